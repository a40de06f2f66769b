"""Which M to capture for a load: sizes of steps chosen on a cost curve, each with what it is for.

Every captured size costs memory and start-up time, and a step pays for the smallest that holds its rows. The score of a set
is the mean log of tokens/s over the load, where each step takes its best node count on the curve that this set makes of T:
so sizes are put where trees would stop if any M could be launched.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.curve import CostCurve
from runtime.price import Price

F64 = NDArray[np.float64]
MOST_SIZES = 24
WORTH = 0.0005  # of tokens/s over the load that a further size must bring
SPREAD = ((0.0, 0.1), (0.7, 0.3), (1.0, 0.3), (1.3, 0.3))  # (acceptance ÷ mean, share): steps differ, and one in ten has no draft
PROMPT_STEP = 64  # prompt rows of recorded steps are grouped: a chunk of 200 rows and one of 210 are one case


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step in a load. nodes: of each stream, fixed; None: as many as pay."""

    streams: int
    prompt: int
    weight: float
    nodes: int | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """A chosen M: the share of tokens/s that the load loses without it, and the steps that take it."""

    rows: int
    loss: float
    used: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suggestion:
    sizes: tuple[Size, ...]
    gain: float  # tokens/s over the load, against the curve's own sizes, as a share
    before: tuple[int, ...]  # those sizes


def read_load(given: Sequence[str], nodes: int | None = None) -> list[Case]:
    """Cases from STREAMS:WEIGHT words, or from a trace file of the server (its steps count). ValueError names what is wrong."""
    cases: Counter[tuple[int, int]] = Counter()
    for word in given:
        if Path(word).is_file():
            cases.update(_read_trace(Path(word)))
            continue
        streams, _, weight = word.partition(":")
        try:
            cases[int(streams), 0] += float(weight or 1)  # type: ignore[assignment]
        except ValueError:
            raise ValueError(f"load {word!r} is neither STREAMS:WEIGHT nor a trace file") from None
    if not cases or min(s for s, _ in cases) < 1 or min(cases.values()) <= 0:
        raise ValueError(f"load {list(given)}: no step with at least one stream and a weight above 0")
    total = sum(cases.values())
    return [Case(s, p, weight / total, nodes) for (s, p), weight in sorted(cases.items())]


def _read_trace(path: Path) -> Counter[tuple[int, int]]:
    """Steps by (streams, prompt rows) of a Chrome trace, its closing bracket absent or not."""
    text = path.read_text(encoding="utf-8").strip().rstrip(",")
    try:
        events = json.loads(text if text.endswith("]") else text + "]")
    except ValueError as error:
        raise ValueError(f"{path}: not a trace ({error}); the server's --trace writes one") from None
    steps = [e["args"] for e in events if e.get("name") == "step" and "streams" in e.get("args", {})]
    return Counter((s["streams"], -(-s["prompt"] // PROMPT_STEP) * PROMPT_STEP) for s in steps if s["streams"])


def read_gain(path: Path) -> tuple[F64, F64]:
    """Nodes of a stream, and how many of them are accepted on average where they are given to the best streams.

    From records of fixed trees and of auto, simulated or measured: the least concave curve above their points.
    """
    points = {0.0: 0.0}
    for line in path.read_text(encoding="utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        if record.get("policy") in ("tree", "auto"):
            nodes = record["nodes_per_stream"]
            points[nodes] = max(points.get(nodes, 0.0), record["accepted_per_step"])
    if len(points) < 3:
        raise ValueError(f"{path}: {len(points) - 1} sizes of trees; at least 2 are needed to tell what nodes bring")
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points.items()):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0]) <= (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    rising = np.array(hull)
    return rising[:, 0], np.maximum.accumulate(rising[:, 1])


def candidates(most: int) -> list[int]:
    """M worth a graph: 1, 2, 4, 8, then steps of an eighth, rounded to 8 (16 from 128 on, 64 from 512 on); `most` at the end."""
    sizes, m = [1, 2, 4], 8
    while m < most:
        sizes.append(m)
        grain = 8 if m < 128 else 16 if m < 512 else 64
        m += max(grain, m // 8 // grain * grain)
    return [*(m for m in sizes if m < most), most]


class Chooser:
    """Scores sets of sizes for one curve, load and gain."""

    def __init__(self, curve: CostCurve, cases: Sequence[Case], gain: tuple[F64, F64]) -> None:
        self._curve, self._cases, self._gain = curve, cases, gain
        self.most = int(curve.buckets[-1])
        largest = max(case.streams * (1 + (case.nodes or 0)) for case in cases)
        if largest > self.most:
            raise ValueError(f"load: a step of {largest} rows, the curve ends at {self.most}")

    def launched(self, case: Case, curve: CostCurve, scale: float = 1.0) -> tuple[float, int]:
        """Tokens/s of a case and the M that it takes, where nodes are accepted `scale` times as often as on average."""
        price = Price(curve, case.streams, min(case.prompt, self.most - case.streams), self.most, self.most // 4)
        counts = price.counts(int(self._gain[0][-1]) * case.streams)
        if case.nodes is not None:
            counts = np.array([min(case.nodes * case.streams, price.most)])
        most = np.minimum(counts / case.streams, scale * np.interp(counts / case.streams, *self._gain))  # a node is accepted once at most
        tokens = case.streams * (1 + most)
        rates = tokens / price.seconds(counts, case.streams)
        best = int(np.argmax(rates))
        rows = min(case.streams + price.prompt + int(counts[best]), self.most)
        return float(rates[best]), int(curve.buckets[np.searchsorted(curve.buckets, rows)])

    def score(self, sizes: Sequence[int]) -> float:
        """Mean log tokens/s over the load."""
        curve = self.curve(sizes)
        return float(
            sum(case.weight * share * np.log(self.launched(case, curve, scale)[0]) for case in self._cases for scale, share in SPREAD)
        )

    def curve(self, sizes: Sequence[int]) -> CostCurve:
        """The curve if steps came in these sizes: T between the measured ones on a straight line."""
        known, draft = self._curve.buckets, self._curve
        seconds = np.interp(sizes, known, self._curve.step(known))
        seats = sorted({case.streams for case in self._cases})
        made = CostCurve(
            sizes,
            seconds.tolist(),
            key=self._curve.key,
            streams=seats,
            draft_s=[draft.draft(s) for s in seats],
            full=self._curve.full,
        )
        made.host = self._curve.host
        return made

    def choose(self, count: int = MOST_SIZES, worth: float = WORTH) -> Suggestion:
        """Adds the size that brings most until none brings `worth`, moves sizes while that helps, drops what has become useless."""
        chosen, offered = [self.most], set(candidates(self.most)) - {self.most}
        score = self.score(chosen)
        while offered and len(chosen) < count:
            found, size = max((self.score(sorted([*chosen, m])), -m) for m in offered)
            if found - score < worth:
                break
            chosen.append(-size)
            offered.discard(-size)
            score = found
        chosen, score = self._move(chosen, offered | set(chosen[1:]), score)
        for size in sorted(chosen)[:-1]:
            rest = sorted(set(chosen) - {size})
            if score - self.score(rest) < worth:
                chosen.remove(size)
                score = self.score(chosen := rest)
        before = tuple(self._curve.buckets.tolist())
        return Suggestion(self._explain(sorted(chosen)), float(np.expm1(score - self.score(before))), before)

    def _move(self, chosen: list[int], offered: set[int], score: float) -> tuple[list[int], float]:
        """Exchanges one size for another as long as any exchange helps: what was best first need not be beside later ones."""
        while True:
            swaps = [(size, m) for size in chosen if size != self.most for m in offered - set(chosen)]
            tried = [(self.score(sorted({*chosen, m} - {size})), -m, size) for size, m in swaps]
            found, m, size = max(tried, default=(score, 0, 0))
            if found <= score + 1e-9:
                return chosen, score
            chosen, score = [-m if c == size else c for c in chosen], found

    def _explain(self, chosen: list[int]) -> tuple[Size, ...]:
        curve, score = self.curve(chosen), self.score(chosen)
        used: dict[int, list[str]] = {}
        for case in self._cases:
            prompt = f" beside {case.prompt} prompt rows" if case.prompt else ""
            for rows in sorted({self.launched(case, curve, scale)[1] for scale, _ in SPREAD}):
                each = (rows - case.streams - min(case.prompt, rows - case.streams)) / case.streams
                used.setdefault(rows, []).append(f"{case.streams} streams{prompt} of up to {each:.1f} nodes ({case.weight:.0%})")
        losses = [
            float(-np.expm1(self.score(rest) - score)) if (rest := [m for m in chosen if m != size]) and rest[-1] == chosen[-1] else 0.0
            for size in chosen
        ]
        return tuple(Size(m, loss, tuple(used.get(m, ()))) for m, loss in zip(chosen, losses, strict=True))


def show(found: Suggestion, name: str) -> str:
    """The suggestion as text: a line for each size and why, then the flag to start a server with."""
    lines = [f"sizes of steps for {name}: {len(found.sizes)} instead of {len(found.before)}, {found.gain:+.1%} tokens/s over this load"]
    last = found.sizes[-1].rows
    for size in found.sizes:
        why = f"without it {-size.loss:.2%}" if size.rows != last else "the most rows of a step"
        lines.append(f"  M {size.rows:5d}  {why}" + ("; " + "; ".join(size.used) if size.used else ""))
    return "\n".join([*lines, "--cudagraph-capture-sizes " + " ".join(str(size.rows) for size in found.sizes)])
