"""A step function over rising edges that is learned: a prior shape, scaled by what was measured of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.types import Array

F64 = NDArray[np.float64]
EMA_STEPS = 64  # observations of a bucket over which it forgets
OUTLIER = 2.0  # an observation counts at most this many times the present value: a pause of the host is no cost of the device
FIRST, FIT_EVERY = 4, 8  # observations of an edge after which all edges are fitted anew: the first ones, then every so many


class CurveError(ValueError):
    """A stored curve that can not be used as it stands."""


class Learned:
    """A step function over rising edges: a prior shape, and what was measured of it.

    An edge never measured takes the prior times the ratio measured ÷ prior of its neighbours, interpolated; past the
    last one measured the ratio stays. What was measured is made to rise. So a prior of the right shape is only scaled, and
    a constant one is interpolated.
    """

    def __init__(self, edges: Sequence[int], prior: Sequence[float]) -> None:
        self.edges = np.asarray(edges, np.int64)
        self.prior = np.asarray(prior, np.float64)
        if self.edges.ndim != 1 or len(self.edges) == 0 or (np.diff(self.edges) <= 0).any() or self.edges[0] < 1:
            raise CurveError(f"edges {list(edges)[:8]} must be at least one count, from 1 on, rising")
        if self.prior.shape != self.edges.shape or not (np.isfinite(self.prior) & (self.prior >= 0)).all():
            raise CurveError(f"{self.prior.size} times for {len(self.edges)} edges; want one finite number >= 0 for each")
        self._edges: list[int] = self.edges.tolist()
        self.measured = np.full(len(self.edges), np.nan)
        self.count = np.zeros(len(self.edges), np.int64)
        self.value: F64 = self.prior.copy()

    def at(self, n: Array | int, full: float = 1.0) -> F64:
        """The value at the smallest edge >= n; above the last edge it grows in proportion (several launches).

        full: share of the way from the edge below that every n behind it has to pay; the rest rises with n.
        """
        n = np.asarray(n)
        place = np.minimum(np.searchsorted(self.edges, n), len(self.edges) - 1)
        value = self.value[place]
        found: F64 = np.asarray(value * np.maximum(n / self.edges[-1], 1.0))
        return found if full >= 1.0 else found - (1.0 - full) * np.maximum(value - self.between(n), 0.0)

    def between(self, n: Array | int) -> F64:
        """Straight lines between the edges, level behind the last one."""
        return np.asarray(np.interp(n, self.edges, self.value))

    def one(self, n: int, full: float = 1.0) -> float:
        """`at` of one count: 0.5 us where an array takes 5."""
        place = min(bisect_left(self._edges, n), len(self._edges) - 1)
        value, edge = float(self.value[place]), self._edges[place]
        if full < 1.0 and place and n < edge:
            lower, least = self._edges[place - 1], float(self.value[place - 1])
            value -= (1.0 - full) * max(value - least, 0.0) * (edge - n) / (edge - lower)
        return value * max(n / self._edges[-1], 1.0)

    def observe(self, n: int, seconds: float) -> None:
        """Counts one measurement in at the edge that holds n. What is above the last edge is passed over."""
        place = bisect_left(self._edges, n)
        if place == len(self._edges) or not 0 < seconds < math.inf:
            return
        old = float(self.measured[place])
        self.count[place] += 1
        count = int(self.count[place])
        if math.isnan(old):
            self.measured[place] = seconds
        else:
            self.measured[place] = old + (min(seconds, OUTLIER * old) - old) / min(count, EMA_STEPS)
        if count <= FIRST or count % FIT_EVERY == 0:
            self._fit()

    def reshape(self, prior: F64) -> None:
        """Takes another prior; what was measured stays."""
        self.prior = prior.copy()
        self.value = prior.copy()
        if self.count.any():
            self._fit()

    def _fit(self) -> None:
        known = np.flatnonzero(~np.isnan(self.measured))
        prior = np.maximum(self.prior, 1e-9)  # a prior of nothing has a shape too: constant
        ratio = _rising(self.measured[known], np.minimum(self.count[known], EMA_STEPS)) / prior[known]
        self.value = prior * np.interp(self.edges, self.edges[known], ratio)


def _rising(value: F64, weight: Array) -> F64:
    """The nearest rising values in weighted squares, by pooling neighbours that fall (isotonic regression).

    More rows never cost less: a step may always be padded. So one slow measurement of a small edge is corrected by faster
    larger ones, which matters as an edge that looks dear is not chosen and hence not measured again.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for v, w in zip(value.tolist(), weight.tolist(), strict=True):
        pools.append((v, float(w), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.repeat([mean for mean, _, _ in pools], [members for _, _, members in pools])
