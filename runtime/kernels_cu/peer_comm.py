"""Collectives of GPU ranks, recorded like ops: the sums of steps through peer memory, what is larger through NCCL.

Run on the CPU shim by several processes, and on two H200.

A message takes the fastest way for its number of rows, by thresholds that are measured at start (`peers_cuda`). All ranks record
the same calls in the same order, so they meet in every launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.kernels_cu import all_reduce, gather_ranks, record_draft, sample_ranks, top_merge
from runtime.kernels_cu.array import WIDTHS, DeviceArray
from runtime.kernels_cu.device import Device, Runnable
from runtime.kernels_cu.recorder import Recorded, Recorder

ONE, TWO, LARGE = "one_shot", "two_shot", "large"


class Large(Protocol):
    """What carries messages of any size; NCCL on GPUs."""

    def all_reduce(self, address: int, count: int) -> Runnable:
        """`count` bf16 numbers become their sums over ranks, in place."""

    def all_gather(self, source: int, to: int, nbytes: int) -> Runnable:
        """The ranks' `nbytes` bytes each, one after the other in rank order."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The most rows that one_shot and two_shot are the fastest for; 0: never."""

    one: int
    two: int

    def way(self, rows: int) -> str:
        return ONE if rows <= self.one else TWO if rows <= self.two else LARGE


def default_thresholds(config: all_reduce.Config) -> Thresholds:
    """Until there is a measurement: what two H200 showed (one shot to 128 rows), less where a row goes to more peers."""
    return Thresholds(max(1, min(config.blocks, 128 // (config.world - 1))), config.rows)


def region_of(config: all_reduce.Config, drawing: sample_ranks.Config, hidden: int) -> tuple[int, int]:
    """Of a rank's one region: where the part for drawing begins, and bytes in all."""
    behind = -(-config.region_bytes(hidden) // 256) * 256
    return behind, behind + drawing.region_bytes()


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's access to the others, as all_reduce.cu needs it, and sample_ranks.cu; seat None: nobody draws together."""

    config: all_reduce.Config
    ranks: all_reduce.Ranks
    hidden: int
    keep: Any = None
    seat: sample_ranks.Seat | None = None

    def shot(self, device: Device, way: str, rows: int, part: int, norm: all_reduce.Norm | None = None, seq: int = 0) -> Runnable:
        """The prepared sum of part [rows, hidden] by that way."""
        shot = all_reduce.one_shot if way == ONE else all_reduce.two_shot
        call = shot(self.config, rows, self.hidden, self.ranks, part=part, norm=norm, seq=seq)
        functions = device.functions(all_reduce.SOURCE, self.config.defines(self.hidden), all_reduce.ENTRIES)
        return device.prepare(call, functions, (self.keep,))


class PeerComm:
    """One rank's collectives over a recorder's launches. memory None: everything goes the way of large messages."""

    def __init__(
        self, recorder: Recorder, rank: int, world: int, large: Large, memory: PeerMemory | None, thresholds: Thresholds | None = None
    ) -> None:
        self.rank, self.world = rank, world
        self._recorder, self._large, self._memory = recorder, large, memory
        found = thresholds or (default_thresholds(memory.config) if memory else None)
        self.thresholds = found if memory and found else Thresholds(0, 0)
        self.failure: Callable[[], str | None] = lambda: None  # why no collective will end any more

    def all_reduce(self, x: DeviceArray) -> None:
        """x [M, H] bf16 becomes the sum over ranks, in place, rounded once."""
        way = self._way(x)
        if way == LARGE or self._memory is None:
            self._append("all_reduce", self._large.all_reduce(x.flat, x.size))
            return
        rows = x.shape[0]
        self._append("all_reduce", self._memory.shot(self._recorder.device, way, rows, x.flat, seq=self._recorder.alive(rows)))

    def all_reduce_norm(self, ops: Any, x: DeviceArray, delta: DeviceArray, w: DeviceArray, eps: float, *, out: DeviceArray) -> None:
        """x [M, H] += the sum over ranks of delta; out = rms_norm(x) w. Leaves delta undefined."""
        way = self._way(delta)
        if way == LARGE or self._memory is None:
            self.all_reduce(delta)
            ops.add_rms_norm(x, delta, w, eps, out=out)
            return
        rows, norm = x.shape[0], all_reduce.Norm(x.flat, w.flat, out.flat, eps)
        seq = self._recorder.alive(rows)
        self._append("all_reduce_norm", self._memory.shot(self._recorder.device, way, rows, delta.flat, norm, seq))

    def top_logprobs(self, ops: Any, logits: DeviceArray, *, ids: DeviceArray, logp: DeviceArray) -> None:
        """The K likeliest tokens of the whole vocabulary, of which this rank has logits [M, V / W]: ids, logp [M, K]."""
        (rows, share), top, config = logits.shape, ids.shape[1], top_merge.Config(self.world)
        if not config.fits(share, top):
            whole = ops.buffer("draft_logits", (rows, share * self.world), "f32")
            self.all_gather(logits, out=whole)
            ops.top_logprobs(whole, ids=ids, logp=logp)
            return
        own_ids, own_logp = ops.buffer("own_top_ids", (rows, top), "i32"), ops.buffer("own_top_logp", (rows, top), "f32")
        ops.top_logprobs(logits, ids=own_ids, logp=own_logp)
        nbytes, device, live = config.part_bytes(rows, top), self._recorder.device, self._recorder.counted("rows")
        own, parts = (self._recorder.arena.take(f"comm.top_{name}", n) for name, n in (("own", nbytes), ("parts", nbytes * self.world)))
        functions = self._merging(config)
        made = {"logits": logits.flat, "ids": own_ids.flat, "logp": own_logp.flat, "live": live, "out": own}
        pack = top_merge.top_pack(config, rows, share, top, self.rank * share, **made)
        merge = top_merge.top_merge(config, rows, top, parts=parts, live=live, ids=ids.flat, logp=logp.flat)
        self._append("top_merge", device.prepare(pack, functions))
        self._append("all_gather", self._large.all_gather(own, parts, nbytes))
        self._append("top_merge", device.prepare(merge, functions))

    def sample(self, ops: Any, logits: DeviceArray, drawing: Sequence[DeviceArray], **outputs: DeviceArray) -> None:
        """ops.sample over the whole vocabulary, of which this rank has logits [I, V / W], through peer memory.

        Logits are gathered where there is none, or where the kernel has no room for shares of this size.
        """
        (rows, share), memory = logits.shape, self._memory
        if memory and memory.seat and memory.seat.config.fits(share, outputs["top_ids"].shape[1]):
            record_draft.sample_shares(self._recorder, memory.seat, memory.keep, logits, drawing, outputs)
            return
        whole = ops.buffer("logits", (rows, share * self.world), "f32")
        self.all_gather(logits, out=whole)
        ops.sample(whole, *drawing, **outputs)

    def all_gather(self, x: DeviceArray, *, out: DeviceArray) -> None:
        """out [M, W * N] = the ranks' x [M, N], side by side in rank order."""
        rows, width = x.shape
        if out.shape != (rows, width * self.world) or out.dtype != x.dtype:
            raise ValueError(f"all_gather over {self.world} ranks: out is {list(out.shape)} {out.dtype} for x {list(x.shape)} {x.dtype}")
        seat, row_bytes = self._memory and self._memory.seat, width * WIDTHS[x.dtype]
        if seat and gather_ranks.fits(seat, rows, row_bytes):
            self._append("all_gather", self._gather(seat, rows, row_bytes, x, out))
            return
        parts, config = self._recorder.arena.take("comm.gather", x.nbytes * self.world), top_merge.Config(self.world)
        self._append("all_gather", self._large.all_gather(x.flat, parts, x.nbytes))
        call = top_merge.side_by_side(config, rows, row_bytes, parts=parts, out=out.flat)
        self._append("all_gather", self._recorder.device.prepare(call, self._merging(config)))

    def _gather(self, seat: sample_ranks.Seat, rows: int, row_bytes: int, x: DeviceArray, out: DeviceArray) -> Runnable:
        device = self._recorder.device
        functions = device.functions(gather_ranks.SOURCE, seat.config.defines(), gather_ranks.ENTRIES)
        return device.prepare(gather_ranks.call(seat, rows, row_bytes, x=x.flat, out=out.flat), functions, (self._memory,))

    def _merging(self, config: top_merge.Config) -> Mapping[str, Any]:
        return self._recorder.device.functions(top_merge.SOURCE, config.defines(), top_merge.ENTRIES)

    def _way(self, x: DeviceArray) -> str:
        if self._memory is None:
            return LARGE
        if x.shape[1] != self._memory.hidden:
            raise ValueError(f"all_reduce: rows of {x.shape[1]} numbers; this group was made for {self._memory.hidden}")
        way, rows = self.thresholds.way(x.shape[0]), x.shape[0]
        # batch invariance: both shots sum in rank order, NCCL in an order of its own
        return TWO if self._recorder.invariant and way == LARGE and rows <= self._memory.config.rows else way

    def _append(self, op: str, run: Runnable) -> None:
        self._recorder.recorded.append(Recorded(op, {}, run))
