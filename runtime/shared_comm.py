"""Collectives of ranks that share a block of host memory: the CPU's tensor parallelism.

Every rank copies its part into a place of its own, meets the others, and reads all parts. Places are used in turn, so one
meeting suffices: a place is written again two exchanges later, when everybody has been seen past the one between. Parts are
summed in rank order, so all ranks hold the same bits and sample the same tokens without a broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.sampling_shares import Share, sample_share
from runtime.shared import LINE, SharedBlock, Watch
from runtime.types import Array

PIECE_BYTES = 1 << 20  # of a part: longer ones go piece by piece


class SharedComm:
    """One rank's end; every rank makes its own over the same block with the same numbers."""

    def __init__(self, rank: int, world: int, block: SharedBlock, at: int, watch: Watch) -> None:
        self.rank = rank
        self.world = world
        self._watch = watch
        self._words = block.words
        self._arrived = [(at + peer * LINE) // 8 for peer in range(world)]
        places = at + world * LINE
        self._places = [
            [block.array(places + (turn * world + peer) * PIECE_BYTES, PIECE_BYTES) for peer in range(world)] for turn in range(2)
        ]
        self._count = 0

    @staticmethod
    def nbytes(world: int) -> int:
        """Bytes of the block that a group takes."""
        return world * (LINE + 2 * PIECE_BYTES)

    def all_reduce(self, x: Array) -> None:
        """x [M, H] bf16 becomes the sum over ranks, in place, rounded once."""
        flat = x.reshape(-1)
        if not np.shares_memory(flat, x) and x.size:
            raise ValueError(f"all_reduce: x {list(x.shape)} is not contiguous")
        each = PIECE_BYTES // x.itemsize
        for start in range(0, flat.size, each):
            piece = flat[start : start + each]
            parts = self._exchange(piece)
            total = parts[0].astype(np.float32)
            for part in parts[1:]:
                total += part
            piece[:] = total

    def all_reduce_norm(self, ops: Any, x: Array, delta: Array, w: Array, eps: float, *, out: Array) -> None:
        """x [M, H] += the sum over ranks of delta; out = rms_norm(x) w."""
        self.all_reduce(delta)
        ops.add_rms_norm(x, delta, w, eps, out=out)

    def top_logprobs(self, ops: Any, logits: Array, *, ids: Array, logp: Array) -> None:
        """The K likeliest tokens of the whole vocabulary, of which this rank has logits [M, V / W]: ids, logp [M, K].

        Ranks tell each other K tokens, their logits, and the log of their sum of exponentials. A log-probability may differ from the
        whole's in its last bits: one sum is cut.
        """
        (rows, share), top = logits.shape, ids.shape[1]
        if top > share:
            whole = ops.buffer("draft_logits", (rows, share * self.world), "f32")
            self.all_gather(logits, out=whole)
            ops.top_logprobs(whole, ids=ids, logp=logp)
            return
        own_ids, own_logp = ops.buffer("own_top_ids", (rows, top), "i32"), ops.buffer("own_top_logp", (rows, top), "f32")
        ops.top_logprobs(logits, ids=own_ids, logp=own_logp)
        value = np.take_along_axis(logits, own_ids.astype(np.int64), axis=1)
        told = np.concatenate([(own_ids + self.rank * share).view(np.float32), value, value[:, :1] - own_logp[:, :1]], axis=1)
        heard = np.empty((rows, self.world * told.shape[1]), np.float32)
        self.all_gather(told, out=heard)
        parts = heard.reshape(rows, self.world, -1)
        names = np.ascontiguousarray(parts[:, :, :top]).view(np.int32).reshape(rows, -1)
        values, sums = parts[:, :, top : 2 * top].reshape(rows, -1), parts[:, :, -1].astype(np.float64)
        with np.errstate(invalid="ignore"):  # rows with NaN
            best = np.lexsort((names, -values), axis=1)[:, :top]
            total = np.logaddexp.reduce(sums, axis=1)
            ids[:] = np.take_along_axis(names, best, axis=1)
            logp[:] = np.take_along_axis(values, best, axis=1) - total[:, None]

    def sample(self, ops: Any, logits: Array, drawing: Sequence[Array], **outputs: Array) -> None:
        """ops.sample over the whole vocabulary, of which this rank has logits [I, V / W]: the same tokens, see `sampling_shares`."""
        size = logits.shape[1]

        def tell(mine: Array) -> Array:
            heard = np.empty((len(mine), self.world * mine.shape[1]), mine.dtype)
            self.all_gather(mine, out=heard)
            return heard.reshape(len(mine), self.world, -1)

        sample_share(tell, Share(self.rank * size, size, self.world * size), logits, tuple(drawing), **outputs)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, equally many of each (1 MiB at most), in rank order. Waits as long as all live: others may be loading."""
        return [part.tobytes() for part in self._exchange(np.frombuffer(mine, np.uint8), patient=True)]

    def broadcast(self, x: Array) -> None:
        """x of any shape, contiguous, becomes rank 0's."""
        flat = x.reshape(-1)
        each = PIECE_BYTES // x.itemsize
        for start in range(0, flat.size, each):
            piece = flat[start : start + each]
            piece[:] = self._exchange(piece)[0]

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return min(int.from_bytes(part, "little") for part in self.gather_bytes(value.to_bytes(8, "little")))

    def lost(self) -> str | None:
        """Which rank is gone, if one is."""
        rank = self._watch.lost
        return None if rank is None else f"rank {rank} is gone"

    def all_gather(self, x: Array, *, out: Array) -> None:
        """out [M, W * N] = the ranks' x [M, N], side by side in rank order."""
        each = PIECE_BYTES // (x.shape[1] * x.itemsize)
        if not each:
            raise ValueError(f"all_gather: a row of {x.shape[1]} numbers exceeds {PIECE_BYTES} bytes")
        for start in range(0, len(x), each):
            piece = np.ascontiguousarray(x[start : start + each])
            parts = self._exchange(piece.reshape(-1))
            np.concatenate([part.reshape(piece.shape) for part in parts], axis=1, out=out[start : start + each])

    def _exchange(self, part: Array, patient: bool = False) -> list[Array]:
        """Every rank's part [n], in rank order; valid until the exchange after the next."""
        self._count += 1
        count, words, arrived = self._count, self._words, self._arrived
        places = self._places[count % 2]
        places[self.rank][: part.nbytes] = part.view(np.uint8)
        words[arrived[self.rank]] = count
        for peer in range(self.world):
            if words[arrived[peer]] < count:
                what = f"rank {peer} has not come to exchange {count}"
                self._watch.wait(lambda at=arrived[peer]: words[at] >= count, what, patient)  # type: ignore[misc]
        return [place[: part.nbytes].view(part.dtype) for place in places]
