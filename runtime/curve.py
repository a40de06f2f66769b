"""What a step costs on this machine: T(M, context) of the target, T_d(S) of the drafter, and the host's share.

A step is launched with the rows of its bucket, so T is a step function: 33 rows in a bucket of 48 cost what 48 do, and the
rows in between are free. No convexity is assumed anywhere. A mixture of experts is concave where the expert union grows
(E (1 - (1 - k/E)^M)), flat behind it and linear at last, so a rate of tokens over T has more than one local optimum.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.types import Array

F64 = NDArray[np.float64]
EMA_STEPS = 64  # observations of a bucket over which it forgets
OUTLIER = 2.0  # an observation counts at most this many times the present value: a pause of the host is no cost of the device
FIRST, FIT_EVERY = 4, 8  # observations of an edge after which all edges are fitted anew: the first ones, then every so many
FORMAT = 1
MARGINAL_SHARE = 0.25  # a further row is cheap when it costs less than this part of the average row


class CurveError(ValueError):
    """A stored curve that can not be used as it stands."""


@dataclass(frozen=True, slots=True)
class CurveKey:
    """What a curve holds for: the device, the model and the tensor-parallel size."""

    gpu: str
    model: str
    tp: int


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

    def at(self, n: Array | int) -> F64:
        """The value at the smallest edge >= n; above the last edge it grows in proportion (several launches)."""
        n = np.asarray(n)
        place = np.minimum(np.searchsorted(self.edges, n), len(self.edges) - 1)
        over: F64 = np.maximum(n / self.edges[-1], 1.0)
        return self.value[place] * over

    def one(self, n: int) -> float:
        """`at` of one count: 0.5 us where an array takes 5."""
        place = min(bisect_left(self._edges, n), len(self._edges) - 1)
        return float(self.value[place]) * max(n / self._edges[-1], 1.0)

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


def find_threshold(rows: Sequence[int], times: Sequence[float], share: float = MARGINAL_SHARE) -> int | None:
    """The least M from which a further row costs less than `share` of the average one, up to the next M that was timed.

    rows: rising M; times: of a step of that many rows, in any unit, above 0. None where every row is dear.
    """
    for (here, took), (there, longer) in pairwise(zip(rows, times, strict=True)):
        if (longer - took) / (there - here) < share * took / here:
            return here
    return None


class CostCurve:
    """T(M, ctx), T_d(S) and the host's overhead, seconds, kept by moving means of what steps took.

    buckets: rising M that steps are launched with. contexts: rising upper edges of the committed tokens that the streams
    of a step hold together; the last one stands for all above it. Not safe for threads: the engine's thread owns it.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        step_s: Sequence[float] | Sequence[Sequence[float]],
        *,
        key: CurveKey,
        contexts: Sequence[int] = (1 << 40,),
        streams: Sequence[int] = (1 << 20,),
        draft_s: Sequence[float] = (0.0,),
        overhead_s: float = 0.0,
        note: str = "",
    ) -> None:
        rows: Sequence[Sequence[float]] = np.broadcast_to(np.asarray(step_s, np.float64), (len(contexts), len(buckets))).tolist()
        if not overhead_s >= 0:
            raise CurveError(f"overhead: {overhead_s!r} s must be 0 or more")
        self.key = key
        self.note = note  # where the prior comes from and what it assumes
        self.contexts = tuple(contexts)
        self._steps = [Learned(buckets, row) for row in rows]
        self._seen: list[int] = []  # contexts with a measurement
        self._draft = Learned(streams, draft_s)
        self._overhead = Learned((1,), (overhead_s,))
        if list(self.contexts) != sorted(set(self.contexts)) or not self.contexts:
            raise CurveError(f"contexts {self.contexts} must rise")

    @property
    def buckets(self) -> Array:
        return self._steps[0].edges

    @property
    def overhead_s(self) -> float:
        return float(self._overhead.value[0])

    def _for_context(self, ctx: int) -> Learned:
        place = bisect_left(self.contexts, ctx, hi=len(self.contexts) - 1)
        seen = self._seen
        return self._steps[min(seen, key=lambda i: abs(i - place))] if seen and place not in seen else self._steps[place]

    def step(self, rows: Array | int, ctx: int = 0) -> F64:
        """Seconds of a step of that many live rows; a context never measured costs what the nearest measured one does."""
        return self._for_context(ctx).at(rows)

    def draft(self, streams: int) -> float:
        return self._draft.one(streams) if streams else 0.0

    def step_seconds(self, rows: int, streams: int, ctx: int = 0) -> float:
        """A whole cycle: host, draft for `streams` roots (0: none), verification."""
        return self.overhead_s + self.draft(streams) + self._for_context(ctx).one(rows)

    def share_shape(self) -> None:
        """Lets contexts never measured, and edges of those that were, take the first one's shape: a step there costs so much more."""
        for step in self._steps[1:]:
            step.reshape(self._steps[0].value)

    def observe_step(self, rows: int, ctx: int, seconds: float) -> None:
        place = bisect_left(self.contexts, ctx, hi=len(self.contexts) - 1)
        self._steps[place].observe(rows, seconds)
        if place not in self._seen and self._steps[place].count.any():
            self._seen = sorted([*self._seen, place])

    def observe_draft(self, streams: int, seconds: float) -> None:
        self._draft.observe(streams, seconds)

    def observe_overhead(self, seconds: float) -> None:
        self._overhead.observe(1, seconds)

    def to_json(self) -> dict[str, Any]:
        """Milliseconds as they stand now; a curve read back takes them as its prior."""
        return {
            "format": FORMAT,
            "gpu": self.key.gpu,
            "model": self.key.model,
            "tp": self.key.tp,
            "note": self.note,
            "overhead_ms": round(self.overhead_s * 1e3, 6),
            "draft_streams": self._draft.edges.tolist(),
            "draft_ms": [round(v * 1e3, 6) for v in self._draft.value.tolist()],
            "buckets": self.buckets.tolist(),
            "contexts": list(self.contexts),
            "step_ms": [[round(v * 1e3, 6) for v in self._for_context(edge).value.tolist()] for edge in self.contexts],
        }

    def save(self, path: Path) -> None:
        """Writes the curve as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".tmp")
        partial.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @staticmethod
    def load(path: Path, key: CurveKey | None = None) -> CostCurve:
        """Reads a curve; with a key, only one of that GPU, model and TP. CurveError names file, field and both values."""
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CurveError(f"{path}: not JSON ({error}); delete it to measure again") from None
        if not isinstance(held, Mapping) or held.get("format") != FORMAT:
            raise CurveError(f"{path}: not a cost curve of format {FORMAT}; delete it to measure again")
        for name, want in (("gpu", key.gpu), ("model", key.model), ("tp", key.tp)) if key else ():
            if held.get(name) != want:
                raise CurveError(f"{path}: {name} is {held.get(name)!r}, wanted {want!r}; measure a curve for it")
        try:
            return CostCurve(
                held["buckets"],
                np.asarray(held["step_ms"], np.float64) / 1e3,  # type: ignore[arg-type]
                key=CurveKey(str(held["gpu"]), str(held["model"]), int(held["tp"])),
                contexts=held["contexts"],
                streams=held["draft_streams"],
                draft_s=(np.asarray(held["draft_ms"], np.float64) / 1e3).tolist(),
                overhead_s=float(held["overhead_ms"]) / 1e3,
                note=str(held.get("note", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CurveError(f"{path}: {type(error).__name__}: {error}; delete it to measure again") from None


def curve_file(folder: Path, key: CurveKey) -> Path:
    """Where the curve of a key is kept: one file a key, named after it."""
    name = "-".join((key.gpu, key.model, f"tp{key.tp}"))
    return folder / ("".join(c if c.isalnum() or c in "-_." else "_" for c in name) + ".json")
