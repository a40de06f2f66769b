"""Whether to draft at all: judged before the draft is paid, from what recent drafts were worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.host_cost import HostCost
from runtime.price import UNBOUNDED, Price

F64 = NDArray[np.float64]
POOL = 64  # draft trees remembered
PROBE, LONGEST_PROBE = 32, 512  # steps without a draft until one is made for the sake of knowing: doubled each time it did not pay
KEPT = 16  # times that an answer is given again while the curve may change under it
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
        self._sure = False  # the last draft paid by its own values
        self._sums: F64 | None = None  # of _gain, until the pool changes
        self._mean: F64 | None = None  # of `even`, likewise
        self._answer: tuple[tuple[object, ...], tuple[float, int]] | None = None  # of `best`, likewise
        self._asked = 0

    @property
    def seen(self) -> bool:
        """Whether any tree is remembered."""
        return self._seen > 0

    def observe(self, value: F64) -> None:
        """Remembers the values [B, N] of trees as they were drafted (0: no node); the oldest make room."""
        if value.shape[1] > self._pool.shape[1]:
            self._pool = np.pad(self._pool, ((0, 0), (0, value.shape[1] - self._pool.shape[1])))
        rows = value[-POOL:]
        places = (self._seen + np.arange(len(rows))) % POOL
        self._pool[places] = 0.0
        self._pool[places, : value.shape[1]] = rows
        self._seen += len(rows)
        self._sums = self._mean = self._answer = None

    def settle(self, price: Price, base: float, expected: float, seconds: float, streams: int, most: int = UNBOUNDED) -> None:
        """Hears what a step with a draft was expected to bring: if that pays, the next one is not asked about, else its answer is
        worked out now."""
        self._sure = (base + expected) / seconds > MARGIN * base / float(price.seconds(0, 0))
        if not self._sure:
            self.best(price, base, streams, most)

    def pays(self, price: Price, *, base: float, streams: int, most: int = UNBOUNDED) -> bool:
        """Whether a draft for `streams` roots should raise tokens/s; now and then True whatever is expected, after
        PROBE steps without a draft, and after twice as many each time until drafts pay again.

        base, most as in `budget.allocate`.
        """
        if streams == 0:
            return False
        if self._sure or not self._seen or self.best(price, base, streams, most)[0] > MARGIN * base / float(price.seconds(0, 0)):
            self._skipped, self._patience, self._sure = 0, PROBE, False
            return True
        self._skipped += 1
        if self._skipped < self._patience:
            return False
        self._skipped, self._patience = 0, min(2 * self._patience, LONGEST_PROBE)
        return True

    def best(self, price: Price, base: float, streams: int, most: int = UNBOUNDED) -> tuple[float, int]:
        """The best tokens/s that trees like the last ones allow with a draft for `streams` roots, and its node count."""
        trees = max(1, min(self._seen, POOL))
        total = self._gain()
        bound = min(most, (len(total) - 1) * streams // trees)
        case = (price.curve, price.roots, price.prompt, price.limit, price.reserved, base, streams, bound)
        if self._answer is None or self._answer[0] != case or self._asked >= KEPT:
            counts = price.counts(bound)
            gain = np.interp(counts * trees / max(streams, 1), np.arange(len(total)), total) * streams / trees
            rates = (base + gain) / price.seconds(counts, streams)
            place = int(np.argmax(rates))
            self._answer, self._asked = (case, (float(rates[place]), int(counts[place]))), 0
        self._asked += 1
        return self._answer[1]

    def even(self, price: Price, streams: int, most: int, growing: HostCost) -> tuple[int, float]:
        """Nodes a stream that bring most tokens/s if all get as many, at most `most` together, and how many should be accepted of all.

        growing: what the host takes to grow them.
        """
        if self._mean is None:
            trees = max(1, min(self._seen, POOL))
            self._mean = np.concatenate([[0.0], np.cumsum(self._pool[:trees].sum(axis=0) / trees)])
        gain = self._mean[: min(most, price.most) // max(streams, 1) + 1] * streams
        nodes = np.arange(len(gain)) * streams
        place = int(np.argmax((price.roots + gain) / (price.seconds(nodes, streams) + growing.at(streams, nodes, True))))
        return place, float(gain[place])

    def _gain(self) -> F64:
        """Sums of the 0, 1, 2 … largest values of the pool."""
        if self._sums is None:
            falling = np.sort(self._pool[: min(self._seen, POOL)].ravel())[::-1]
            self._sums = np.concatenate([[0.0], np.cumsum(falling[: int(np.count_nonzero(falling))])])
        return self._sums
