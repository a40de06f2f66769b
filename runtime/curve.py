"""What a step costs on this machine: T(M, context) of the target, T_d(S) of the drafter, and the host's share.

A step is launched with the rows of its bucket, so T is a step function: 33 rows in a bucket of 48 cost what 48 do, and the
rows in between are free. No convexity is assumed anywhere. A mixture of experts is concave where the expert union grows
(E (1 - (1 - k/E)^M)), flat behind it and linear at last, so a rate of tokens over T has more than one local optimum.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.host_cost import HostCost
from runtime.learned import EMA_STEPS, CurveError, Learned
from runtime.types import Array

F64 = NDArray[np.float64]
FORMAT = 1
TELLING = 0.05  # of a bucket's time: if dead rows may save so much, a step tells what they do
MARGINAL_SHARE = 0.25  # a further row is cheap when it costs less than this part of the average row


@dataclass(frozen=True, slots=True)
class CurveKey:
    """What a curve holds for: the device, the model and the tensor-parallel size."""

    gpu: str
    model: str
    tp: int


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
        full: float = 1.0,
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
        self.host = HostCost(overhead_s)
        self._full, self._parts = full, 0  # and of how many steps in part-filled buckets
        if list(self.contexts) != sorted(set(self.contexts)) or not self.contexts:
            raise CurveError(f"contexts {self.contexts} must rise")

    @property
    def buckets(self) -> Array:
        return self._steps[0].edges

    @property
    def full(self) -> float:
        """Share of the way up from the bucket below that a bucket costs however few of its rows are live; the rest rises with them.

        1: padding costs what rows do. 0: nothing, as where experts' weights are all that takes time, for a dead row hits no expert
        (K2.6's layers on an H200: 10 rows in a bucket of 16 took 5.5 ms, 8 rows 5.2 and 16 rows 6.4).
        """
        return self._full

    def _for_context(self, ctx: int) -> Learned:
        place = bisect_left(self.contexts, ctx, hi=len(self.contexts) - 1)
        seen = self._seen
        return self._steps[min(seen, key=lambda i: abs(i - place))] if seen and place not in seen else self._steps[place]

    def step(self, rows: Array | int, ctx: int = 0) -> F64:
        """Seconds of a step of that many live rows; a context never measured costs what the nearest measured one does."""
        return self._for_context(ctx).at(rows, self._full)

    def draft(self, streams: int) -> float:
        return self._draft.one(streams) if streams else 0.0

    def step_seconds(self, rows: int, streams: int, ctx: int = 0) -> float:
        """A whole cycle without prompts: host, draft for `streams` roots (0: none), verification."""
        host_s = self.host.at(streams or rows, max(rows - streams, 0) if streams else 0, streams > 0)
        return float(host_s) + self.draft(streams) + self._for_context(ctx).one(rows, self._full)

    def share_shape(self) -> None:
        """Lets contexts never measured, and edges of those that were, take the first one's shape: a step there costs so much more."""
        for step in self._steps[1:]:
            step.reshape(self._steps[0].value)

    def observe_step(self, rows: int, ctx: int, seconds: float, bucket: int | None = None) -> None:
        """rows: live ones, of `bucket` that were launched (None: all are live). Where many are not, a step tells what dead rows cost."""
        place = bisect_left(self.contexts, ctx, hi=len(self.contexts) - 1)
        held, bucket = self._steps[place], bucket or rows
        value = held.one(bucket)
        saved = value - held.one(rows, 0.0) if rows < bucket else 0.0  # if dead rows cost nothing
        if saved > TELLING * value and place in self._seen:
            self._parts += 1
            found = min(max(1.0 - (value - seconds) / saved, 0.0), 1.0)
            self._full += (found - self._full) / min(self._parts + 1, EMA_STEPS)
            return
        held.observe(bucket, seconds + (1.0 - self._full) * saved)
        if place not in self._seen and held.count.any():
            self._seen = sorted([*self._seen, place])

    def observe_draft(self, streams: int, seconds: float) -> None:
        self._draft.observe(streams, seconds)

    def to_json(self) -> dict[str, Any]:
        """Milliseconds as they stand now; a curve read back takes them as its prior."""
        learned: dict[str, Any] = {"host_ms": self.host.to_json()} if self.host.seen else {}
        if self._full < 1.0:
            learned["full"] = round(self._full, 4)
        return learned | {
            "format": FORMAT,
            "gpu": self.key.gpu,
            "model": self.key.model,
            "tp": self.key.tp,
            "note": self.note,
            "overhead_ms": round(self.host.fixed_s * 1e3, 6),
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
            curve = CostCurve(
                held["buckets"],
                np.asarray(held["step_ms"], np.float64) / 1e3,  # type: ignore[arg-type]
                key=CurveKey(str(held["gpu"]), str(held["model"]), int(held["tp"])),
                contexts=held["contexts"],
                streams=held["draft_streams"],
                draft_s=(np.asarray(held["draft_ms"], np.float64) / 1e3).tolist(),
                overhead_s=float(held["overhead_ms"]) / 1e3,
                full=float(held.get("full", 1.0)),
                note=str(held.get("note", "")),
            )
            curve.host.read(held.get("host_ms", []))
            return curve
        except (KeyError, TypeError, ValueError) as error:
            raise CurveError(f"{path}: {type(error).__name__}: {error}; delete it to measure again") from None


def curve_file(folder: Path, key: CurveKey) -> Path:
    """Where the curve of a key is kept: one file a key, named after it."""
    name = "-".join((key.gpu, key.model, f"tp{key.tp}"))
    return folder / ("".join(c if c.isalnum() or c in "-_." else "_" for c in name) + ".json")
