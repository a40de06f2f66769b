"""How the ranks of one stage reach those of the others: on a CPU for every step, for GPUs until their devices are connected.

Only the first ranks of stages, the leaders, hold connections. What comes for a whole stage comes to its leader, who tells the
others through the memory that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.shared_comm import SharedComm
from runtime.stage_link import Link, StageLost
from runtime.types import Array

EXCHANGE, STATES = 8, 9  # kinds of records
MAX_EXCHANGE = 1 << 20

Exchange = Callable[[bytes], Sequence[bytes]]  # a leader's bytes -> every leader's, equally many, in order of stages


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where a rank's stage stands: number of count; device: of the stage's first rank on its host.

    A leader's hold how it reaches the others: `exchange` while all load, `before` and `after` for steps on a CPU; lost: why no other
    stage will answer any more, None while all are there.
    """

    number: int
    count: int
    device: int = 0
    exchange: Exchange | None = None
    before: Link | None = None
    after: Link | None = None
    lost: Callable[[], str | None] = lambda: None


class HostNeighbours:
    """`runtime.comm.Neighbours` over TCP. host: the other ranks of this stage, None if there are none."""

    def __init__(self, place: StagePlace, host: SharedComm | None) -> None:
        self._before, self._after, self._host = place.before, place.after, host

    def receive(self, x: Array) -> None:
        if self._before is not None:
            nbytes = self._before.expect(STATES)
            if nbytes != x.nbytes:
                raise StageLost(f"{self._before.name} sent {nbytes} bytes of hidden states, where {list(x.shape)} take {x.nbytes}")
            self._before.read(x)
        if self._host is not None:
            self._host.broadcast(x)

    def send(self, x: Array) -> None:
        if self._after is not None:
            self._after.send(STATES, x)


class StageHost:
    """All ranks of all stages, numbered stage by stage, before their devices can meet."""

    def __init__(self, place: StagePlace, host: SharedComm | None) -> None:
        self._place, self._host = place, host
        own, self._tp = (host.rank, host.world) if host else (0, 1)
        self.rank, self.world = place.number * self._tp + own, place.count * self._tp

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, equally many of each."""
        parts = self._host.gather_bytes(mine) if self._host else [mine]
        exchange = self._place.exchange
        whole = b"".join(exchange(b"".join(parts))) if exchange else bytes(len(mine) * self.world)
        if self._host:
            whole = self._host.gather_bytes(whole)[0]
        return [whole[len(mine) * rank : len(mine) * (rank + 1)] for rank in range(self.world)]

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return min(int.from_bytes(part, "little") for part in self.gather_bytes(value.to_bytes(8, "little")))

    def column(self) -> Column:
        """The ranks of this one's number in each stage."""
        return Column(self, self._place.number, self._place.count, self.rank % self._tp, self._tp)


@dataclass(slots=True)
class Column:
    """One rank of each stage: whom this one sends to and receives from."""

    everybody: StageHost
    rank: int
    world: int
    own: int
    tp: int

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """As `StageHost.gather_bytes`, the column's alone; all columns do it together."""
        return self.everybody.gather_bytes(mine)[self.own :: self.tp]


def exchange_as_first(links: Sequence[Link], check: Callable[[], None]) -> Exchange:
    """Stage 0's end of an exchange: hears all the others and tells them. check: as `Link.receive`'s."""

    def exchange(mine: bytes) -> list[bytes]:
        parts = [mine]
        for link in links:
            link.expect(EXCHANGE, check)
            parts.append(link.read_bytes(MAX_EXCHANGE))
        if any(len(part) != len(mine) for part in parts):
            raise StageLost(f"stages exchanged {[len(part) for part in parts]} bytes, which should be equally many")
        for link in links:
            link.send(EXCHANGE, *parts)
        return parts

    return exchange


def exchange_as_other(link: Link, number: int, count: int) -> Exchange:
    """Any other stage's end; link: to stage 0."""

    def exchange(mine: bytes) -> list[bytes]:
        link.send(EXCHANGE, mine)
        nbytes = link.expect(EXCHANGE, lambda: None)
        whole = link.read_bytes(MAX_EXCHANGE)
        if nbytes != count * len(mine) or whole[number * len(mine) : (number + 1) * len(mine)] != mine:
            raise StageLost(f"{link.name} answered an exchange of {len(mine)} bytes among {count} stages with {nbytes}")
        return [whole[len(mine) * stage : len(mine) * (stage + 1)] for stage in range(count)]

    return exchange
