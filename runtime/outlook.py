"""Whether to draft at all: judged before the draft is paid, from what recent drafts were worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.curve import CostCurve

F64 = NDArray[np.float64]
POOL = 64  # draft trees remembered
PROBE, LONGEST_PROBE = 32, 512  # steps without a draft until one is made for the sake of knowing: doubled each time it did not pay
MARGIN = 1.03  # a draft must promise this many times the rate without it: 64 trees are a sample


class Outlook:
    """A pool of the node values of the last POOL trees, which stand for the next step's.

    S streams are expected to offer what the pool does, S / POOL of it at each value. `pays` compares the best rate that
    this allows with the rate of plain decoding; a draft costs T_d(S) even when no node of it is verified afterwards.
    """

    def __init__(self) -> None:
        self._pool: F64 = np.zeros((POOL, 0))
        self._seen = 0
        self._skipped = 0
        self._patience = PROBE

    def observe(self, value: F64) -> None:
        """Remembers the values [B, N] of trees as they were drafted (0: no node); the oldest make room."""
        if value.shape[1] > self._pool.shape[1]:
            self._pool = np.pad(self._pool, ((0, 0), (0, value.shape[1] - self._pool.shape[1])))
        for row in value[-POOL:]:
            place = self._seen % POOL
            self._pool[place] = 0.0
            self._pool[place, : len(row)] = row
            self._seen += 1

    def pays(self, curve: CostCurve, *, rows: int, base: float, streams: int, ctx: int = 0, most: int = 1 << 30) -> bool:
        """Whether a draft for `streams` roots should raise tokens/s; now and then True whatever is expected, after
        PROBE steps without a draft, and after twice as many each time until drafts pay again.

        rows, base, ctx, most as in `budget.allocate`.
        """
        if streams == 0:
            return False
        trees = min(self._seen, POOL)
        plain = base / curve.step_seconds(rows, 0, ctx)
        if trees == 0 or self._best(curve, rows, base, streams, ctx, most, trees) > MARGIN * plain:
            self._skipped, self._patience = 0, PROBE
            return True
        self._skipped += 1
        if self._skipped < self._patience:
            return False
        self._skipped, self._patience = 0, min(2 * self._patience, LONGEST_PROBE)
        return True

    def _best(self, curve: CostCurve, rows: int, base: float, streams: int, ctx: int, most: int, trees: int) -> float:
        falling = np.sort(self._pool[:trees].ravel())[::-1]
        falling = falling[: int(np.count_nonzero(falling))]
        room = max(0, min(most, int(curve.buckets[-1]) - rows, len(falling) * streams // trees))
        fit = curve.buckets - rows
        counts = np.concatenate([[0], fit[(fit > 0) & (fit < room)], [room]])
        total = np.concatenate([[0.0], np.cumsum(falling)])
        gain = np.interp(counts * trees / streams, np.arange(len(total)), total) * streams / trees
        seconds = curve.overhead_s + curve.draft(streams) + curve.step(rows + counts, ctx)
        return float(np.max((base + gain) / seconds))
