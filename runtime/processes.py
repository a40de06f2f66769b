"""Ranks as processes: rank 0 is this one and schedules, every other follows its plans in a process of its own.

    rank 0    pack the plan ─▶ ring        run it ◀─ collectives ─▶        ◀─ answers: the tokens' checksums
    others             ring ─▶ unpack      run it ◀─ collectives ─▶ answer

The plan is published before rank 0 prepares its own inputs. Nobody broadcasts tokens: ranks that sum in rank order draw the
same ones, and every step says so or fails.

A rank that ends, however it ends, is noticed by the thread that started it; that thread says so in the shared block, so
whoever waits there raises. Rank 0's end ends the others (Linux: PR_SET_PDEATHSIG). Nothing is left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from runtime.executor import Captures, Executor, Pending, begin_draft, begin_step
from runtime.lives import Lives, Peers, RankFailed
from runtime.plan import DraftLayout, PlanLayout, pack_draft, pack_plan, unpack_draft, unpack_plan
from runtime.ring import CAPTURE, DRAFT, STEP, STOP, PlanRing
from runtime.shared import LINE, PeerLost, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from runtime.types import Array, DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a group meet in their block: one line to say who is gone, the ring, the collectives' places.

    All ranks make theirs from the same numbers.
    """

    world: int
    plan: PlanLayout
    draft: DraftLayout
    deadline_s: float
    spin_s: float = 0.0

    @property
    def record_bytes(self) -> int:
        return max(self.plan.nbytes, self.draft.nbytes)

    @property
    def nbytes(self) -> int:
        return LINE + self._ring_bytes + SharedComm.nbytes(self.world)

    @property
    def _ring_bytes(self) -> int:
        return PlanRing.nbytes(self.record_bytes, self.world - 1)

    def watch(self, block: SharedBlock) -> Watch:
        return Watch(block, 0, self.deadline_s, self.spin_s)

    def ring(self, block: SharedBlock) -> PlanRing:
        return PlanRing(block, LINE, self.record_bytes, self.world - 1, self.watch(block))

    def comm(self, block: SharedBlock, rank: int) -> SharedComm:
        return SharedComm(rank, self.world, block, LINE + self._ring_bytes, self.watch(block))


def follow(worker: Executor, meeting: Meeting, block: SharedBlock, rank: int) -> None:
    """Executes rank 0's plans until it says stop. Raises PeerLost if a rank is gone, and what the worker raises."""
    ring = meeting.ring(block)
    while True:
        kind, record = ring.next()
        answer = 0
        if kind == STOP:
            ring.finish(rank - 1)
            return
        if kind == STEP:
            answer = checksum(worker.step(unpack_plan(record, meeting.plan)).target)
        elif kind == DRAFT:
            worker.draft(unpack_draft(record, meeting.draft))
        elif kind == CAPTURE and isinstance(worker, Captures):
            answer = worker.capture(read_sizes(record))
        ring.finish(rank - 1, answer)


def write_sizes(sizes: Sequence[int] | None, into: Array) -> None:
    """[n, sizes…] i32; n is -1 for None."""
    words = [-1] if sizes is None else [len(sizes), *sizes]
    into[: 4 * len(words)].view(np.int32)[:] = words


def read_sizes(record: Array) -> list[int] | None:
    count = int(record[:4].view(np.int32)[0])
    return None if count < 0 else record[4 : 4 + 4 * count].view(np.int32).tolist()


def checksum(tokens: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens).tobytes())


class ProcessRanks:
    """An executor over rank 0 here and `peers` elsewhere.

    make_worker(comm) loads rank 0's share while the others load theirs. Raises RankFailed with the cause if one of them can not.
    A rank that ends later makes the step under way, every later one and `trouble` say so.
    """

    def __init__(self, meeting: Meeting, peers: Peers, make_worker: Callable[[SharedComm], Any]) -> None:
        self._meeting = meeting
        block = SharedBlock.create(meeting.nbytes)
        self._group = _Group(meeting, block, peers)
        self._finalizer = weakref.finalize(self, self._group.end)
        self._ring = self._group.ring
        try:
            self._worker = make_worker(meeting.comm(block, 0))
            self._group.wait_ready()
        except BaseException:
            self._group.fail()
            raise
        self.limits: Limits = self._worker.limits

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        with self._together():
            pack_plan(plan, self._meeting.plan, self._ring.record())
            self._ring.publish(STEP)
            return self._watched(begin_step(self._worker, plan), self._compare)

    def draft(self, plan: DraftPlan) -> DraftLogits:
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        with self._together():
            pack_draft(plan, self._meeting.draft, self._ring.record())
            self._ring.publish(DRAFT)
            return self._watched(begin_draft(self._worker, plan))

    def _watched(self, own: Pending[R], check: Callable[[R], None] = lambda result: None) -> Pending[R]:
        """Rank 0's share of a plan, where waiting and reading may fail as the group does."""

        def wait() -> None:
            with self._together():
                own.wait()

        def read() -> R:
            with self._together():
                result = own.read()
                check(result)
            return result

        return Pending(own.done, wait, read)

    def _compare(self, result: StepResult) -> None:
        answers, drawn = self._ring.answers(), checksum(result.target)
        for rank, answer in enumerate(answers, 1):
            if answer != drawn:
                raise RankFailed(f"rank {rank} drew other tokens than rank 0: their sums must have had different bits")

    def trouble(self) -> str | None:
        """Why no further step can succeed, or None."""
        return self._group.story

    def close(self) -> None:
        """Stops the other ranks and waits for their ends; those that take longer than 5 s are killed."""
        self._finalizer()
        self._worker.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """One plan at a time; a failure of this rank or another ends the group."""
        with self._group.lock:
            if self._group.story is not None:
                raise RankFailed(self._group.story)
            try:
                yield
            except PeerLost as lost:
                self._group.fail(str(lost))
                raise RankFailed(self._group.story) from lost
            except BaseException as error:
                self._group.fail(f"rank 0 failed: {type(error).__name__}: {error}")
                raise


class CapturedRanks(ProcessRanks):
    """Ranks that replay steps as graphs."""

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        """As `Captures.capture`, on all ranks. A capture meets nobody, so a bucket that rank 0 refuses reaches no other."""
        wanted = None if buckets is None else list(buckets)
        with self._group.lock:
            count: int = self._worker.capture(wanted)
        with self._together():
            write_sizes(wanted, self._ring.record())
            self._ring.publish(CAPTURE)
            if self._ring.answers() != [count] * (self._meeting.world - 1):
                raise RankFailed(f"ranks hold different numbers of graphs; rank 0 has {count}")
        return count


class _Group(Lives):
    """The other ranks' lives, and the memory where all meet."""

    def __init__(self, meeting: Meeting, block: SharedBlock, peers: Peers) -> None:
        self.ring = meeting.ring(block)
        self._watch, self._block = meeting.watch(block), block
        super().__init__(peers, range(1, meeting.world), "rank", block.path)

    def say_stop(self) -> None:
        with contextlib.suppress(PeerLost):
            self.ring.record()
            self.ring.publish(STOP)

    def tell_lost(self, number: int) -> None:
        self._watch.declare(number)

    def release(self) -> None:
        self._block.close()
