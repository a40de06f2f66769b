"""What a step costs with n draft nodes beside its roots and prompt rows: the denominator of every choice of n."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.curve import CostCurve
from runtime.types import I64

F64 = NDArray[np.float64]
UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class Prices:
    """What can be best: node counts, rising from 0 to the most that there are, and the seconds of a step with so many."""

    counts: I64
    seconds: F64


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step of `roots` decoding streams by its draft nodes, prompt rows on the same curve.

    roots: decoding streams, a row each. prompt: rows that chunks take if no node is verified; past `limit` rows a node takes
    the place of one of them. limit: most rows of a step; the curve's last bucket bounds it too. reserved: prompt rows that
    nodes may not displace. ctx: committed tokens of all streams.

    A step without prompts costs overhead + T_d + T(roots + n). With prompts the decoding streams are charged T(roots), which
    they would have cost alone, and what their nodes add to the whole step, T(roots + prompt + n) - T(roots + prompt): the
    rows in a bucket that the prompts opened are free, and the prompts' own work, which has to be done once whatever n is,
    makes no node look cheap. A displaced prompt row is paid later, at the mean price of a row between the plain
    step and the full one.
    """

    curve: CostCurve
    roots: int
    prompt: int = 0
    limit: int = UNBOUNDED
    reserved: int = 0
    ctx: int = 0

    @property
    def most(self) -> int:
        """Most nodes that a step has room for."""
        return max(0, self._limit - self.roots - min(self.prompt, self.reserved))

    @property
    def _limit(self) -> int:
        return min(self.limit, int(self.curve.buckets[-1]))

    def counts(self, most: int) -> I64:
        """Node counts of which one is best, rising from 0: what fills a bucket, `most`, and all that displace prompt rows.

        Between two edges of T nodes are free if padding costs what they do, so nothing between them can win if each node is worth more
        than nothing. Else every count may win.
        """
        most = min(most, self.most)
        if self.curve.full < 1.0:
            return np.arange(most + 1)
        rows = self.roots + self.prompt
        free = max(0, min(most, self._limit - rows))
        fit = self.curve.buckets - rows
        edges = fit[(fit > 0) & (fit < free)]
        return np.concatenate([[0], edges, np.arange(free if free else 1, most + 1)]).astype(np.int64)

    def table(self, most: int, drafted: int) -> Prices:
        """Counts up to `most` and their seconds: 15 us that a draft in flight hides."""
        counts = self.counts(most)
        return Prices(counts, self.seconds(counts, drafted))

    def seconds(self, nodes: I64 | int, drafted: int) -> F64:
        """overhead + T_d(drafted) + the streams' part of T, for each count of nodes up to `most`."""
        n = np.asarray(nodes, np.int64)
        fixed = self.curve.host.at(self.roots, n, drafted > 0) + self.curve.draft(drafted)
        if not self.prompt:
            return fixed + self.curve.step(self.roots + n, self.ctx)
        whole = min(self.roots + self.prompt, self._limit)
        total = np.minimum(self.roots + self.prompt + n, self._limit)
        alone = float(self.curve.step(self.roots, self.ctx))
        full = float(self.curve.step(self._limit, self.ctx))
        per_row = max(0.0, full - alone) / max(1, self._limit - self.roots)
        displaced = np.maximum(0, n - (self._limit - whole))
        added = self.curve.step(total, self.ctx) - self.curve.step(whole, self.ctx)
        found: F64 = fixed + alone + added + per_row * displaced
        return found
