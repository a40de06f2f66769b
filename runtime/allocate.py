"""Speculation with one node budget for all streams, chosen anew at every step from the machine's own cost curve.

Before a step: is a draft likely to pay? If so, draft for all roots, grow their trees large, value each node by calibrated
acceptance, and keep the nodes that make expected tokens ÷ time greatest. After it: what the step took and which nodes were
accepted go back into curve and calibration.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from runtime.budget import F64, Allocation, Calibration, Cells, allocate, caps_mask, find_cells, prune, stream_weights
from runtime.clock import StepClock, Times
from runtime.config import SpeculativeConfig
from runtime.curve import CostCurve
from runtime.even import Even
from runtime.executor import Executor, begin_draft
from runtime.flight import Flight, Rehearsal
from runtime.grove import Grove
from runtime.outlook import Outlook
from runtime.price import Price, Prices
from runtime.speculate import (
    Load,
    NoSpeculation,
    Root,
    Roots,
    Taps,
    Trees,
    Verified,
    draft_depth,
    likeliest,
    make_draft_plan,
    roots_only,
    write_taps,
)
from runtime.stats import BudgetStep, EngineStats
from runtime.tree import Forest, grow_forest
from runtime.types import I32, Array, Bools, DraftLogits
from runtime.width import Width

HEARD = 4  # of steps whose streams share one in so many is learned from: they are short, and hearing takes 0.1 ms
MOST_NODES = 64  # a stream; 64 streams of them grow in 1.1 ms, so that is rare (runtime/width.py)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a choice is bound to: [B] columns of its roots, and what steps cost."""

    ids: list[str]
    caps: Array  # nodes
    depth: Array
    bounded: bool  # by either
    weight: Array
    alike: bool  # all streams decode and weigh the same: they may share evenly
    share: int  # nodes of each; 0: to be chosen
    expected: float  # of a share accepted
    width: int  # nodes that trees are grown to
    most: int  # nodes in all
    price: Price
    prices: Prices | None  # None: for a share


@dataclass(frozen=True, slots=True)
class _Choice:
    """What was compared, and found."""

    cells: Cells
    value: F64  # [B, N]
    found: Allocation


@dataclass(frozen=True, slots=True)
class _Proposed:
    """One step's offer, until its outcome is known."""

    terms: _Terms
    forest: Forest
    expected: float  # nodes accepted
    choice: _Choice | None  # None: all had a share

    @property
    def kept(self) -> Bools:
        """[B, N] nodes that were offered."""
        terms = self.terms
        return self.choice.found.kept if self.choice else caps_mask(self.forest, np.minimum(terms.caps, terms.width), terms.depth)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a step has to teach, until there is time for it."""

    rows: int  # live
    bucket: int
    times: Times
    proposed: _Proposed | None
    grow_s: float  # of the host, in which it was made
    verified: Mapping[str, Verified]
    experts: float
    stats: EngineStats


class TimedDecoding(NoSpeculation):
    """Plain decoding whose steps go on teaching a cost curve: what a latency target needs where nothing is drafted."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._clock = StepClock(curve, prompts=True)

    def before_step(self, load: Load, stats: EngineStats) -> None:
        self._clock.start(load, stats)

    def after_step(self, rows: int, bucket: int, verified: Mapping[str, Verified], experts: float, stats: EngineStats) -> None:
        self._clock.teach(rows, bucket, self._clock.read(stats))

    def learn(self) -> None:
        """The curve has been told."""


class BudgetSpeculation:
    """DDTree (arXiv 2604.12989) for all streams at once under `runtime.budget.allocate`.

    `curve` is owned by this object from now on. Raises ValueError if the executor has no drafter.
    """

    def __init__(self, executor: Executor, config: SpeculativeConfig, curve: CostCurve) -> None:
        self.depth = draft_depth(executor, config)
        self.nodes = MOST_NODES
        self.curve = curve
        self.calibration = Calibration()
        self.outlook = Outlook()
        self.width = Width(MOST_NODES)
        self.even = Even(self.outlook)
        self._executor = executor
        self._top_k = config.draft_top_k
        self._clock = StepClock(curve)
        self._proposed: _Proposed | None = None  # of the step that is being made
        self._last: DraftLogits | None = None
        self._rehearsal = Rehearsal()
        self._grow_s = 0.0
        self._shared = 0  # steps
        self._lessons: list[Lesson] = []

    def before_step(self, load: Load, stats: EngineStats) -> None:
        self._proposed = None
        self._clock.start(load, stats)

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        """One draft call for all roots, or none where it should not pay; taps are written in either case."""
        load, most = self._clock.load, sum(roots.nodes if isinstance(roots, Roots) else [root.nodes for root in roots])
        decoding = max(load.decoding, len(roots))
        price = Price(self.curve, decoding, load.prompt, load.limit, load.reserved, load.ctx)
        with stats.stage("plan"):
            pays = self.outlook.pays(price, base=decoding, streams=len(roots), most=most)
        if not pays:
            write_taps(self._executor, taps, stats)
            return partial(roots_only, roots)
        with stats.stage("draft"):
            plan = make_draft_plan(roots, taps)
            flight = Flight(begin_draft(self._executor, plan), stats)
            terms = self._terms(roots, price, most)
            choose = partial(self._split if terms.share else self._choose, plan.root, terms)

        def trees() -> Grove:
            last = self._last if self._last is not None and len(self._last.ids) == len(roots) else None
            with stats.stage("draft"):
                landed = flight.land(self._rehearsal, None if last is None else partial(choose, last))
                logits = self._last = likeliest(landed, self._top_k)
            self._clock.count_draft(len(roots), stats)
            with stats.stage("grow"):
                start_s = time.perf_counter()
                self._proposed, grove = choose(logits)
                self._grow_s = time.perf_counter() - start_s
            return grove

        return trees

    def _terms(self, roots: Sequence[Root], price: Price, most: int) -> _Terms:
        """What can be known of a choice before its draft has landed."""
        ids, *columns = Roots.limits(roots)
        caps, depth, weight = (np.array(column) for column in columns)
        alike = not price.prompt and len(roots) == price.roots and weight.min() == weight.max()
        share, expected = self.even.share(price, len(roots), most) if alike else (0, 0.0)
        width = min(int(caps.max()), share or self.width.next())
        return _Terms(
            ids=ids,
            caps=caps,
            depth=depth,
            bounded=bool(caps.min() < width or depth.min() < self.depth),
            weight=weight,
            alike=alike,
            share=share,
            expected=expected,
            width=width,
            most=most,
            price=price,
            prices=None if share else price.table(min(len(roots) * width, most), len(roots)),
        )

    def _choose(self, tokens: I32, terms: _Terms, logits: DraftLogits) -> tuple[_Proposed, Grove]:
        """The nodes to verify. Nothing is kept here, so that it can be rehearsed."""
        forest = grow_forest(logits, tokens, terms.width, self.depth)
        cells = find_cells(forest)
        value = self.calibration.values(forest, cells)
        if terms.bounded:
            value = value * caps_mask(forest, terms.caps, terms.depth)
        found = allocate(
            value,
            terms.price,
            base=float(terms.price.roots),
            drafted=len(tokens),
            weights=stream_weights(value, terms.weight) if len(tokens) > 1 else None,
            most=terms.most,
            prices=terms.prices,
        )
        return _Proposed(terms, forest, found.expected, _Choice(cells, value, found)), prune(forest, found.kept)

    def _split(self, tokens: I32, terms: _Terms, logits: DraftLogits) -> tuple[_Proposed, Grove]:
        """As `_choose`: the same number of nodes for every stream."""
        forest = grow_forest(logits, tokens, terms.width, terms.depth.tolist() if terms.bounded else self.depth)
        return _Proposed(terms, forest, terms.expected, None), forest.cut(np.minimum(terms.caps, terms.width))

    def after_step(self, rows: int, bucket: int, verified: Mapping[str, Verified], experts: float, stats: EngineStats) -> None:
        """Notes what there is to learn from a step of `rows` live rows: its times, and each tree's accepted nodes (by sequence id)."""
        self._lessons.append(Lesson(rows, bucket, self._clock.read(stats), self._proposed, self._grow_s, verified, experts, stats))
        self._proposed, self._grow_s = None, 0.0

    def learn(self) -> None:
        """Works the notes off."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            self.hear(lesson)

    def hear(self, lesson: Lesson) -> None:
        """Teaches curve, calibration and outlook."""
        verified, proposed, times = lesson.verified, lesson.proposed, lesson.times
        expected = proposed.expected if proposed else 0.0
        realised = sum(len(v.path) for v in verified.values())
        lesson.stats.count_budget(
            BudgetStep(
                rows=lesson.rows,
                bucket=lesson.bucket,
                nodes=tuple(v.nodes for v in verified.values()),
                drafted=times.drafted,
                expected=len(verified) + expected,
                realised=realised,
                expected_s=self.curve.step_seconds(lesson.rows, times.drafted, times.load.ctx),
                step_s=times.whole_s,
                experts=lesson.experts,
            )
        )
        if proposed is not None and proposed.choice is None:
            self._shared += 1
            if self._shared % HEARD:
                return
        self._clock.teach(lesson.rows, lesson.bucket, times, lesson.grow_s)
        if proposed is not None:
            self.even.hear(len(proposed.terms.ids), proposed.terms.share, lesson.grow_s, realised - len(verified), expected)
            if proposed.choice is not None:  # a share asks no calibration, and small models' steps are too short for idle work
                kept, accepted = _outcome(proposed, verified)
                self.calibration.observe(proposed.forest, kept, accepted, proposed.choice.cells)
            self._judge(proposed)

    def _judge(self, proposed: _Proposed) -> None:
        """What a draft was worth says whether to make the next one, and how wide."""
        terms, price = proposed.terms, proposed.terms.price
        if proposed.choice is None:
            seconds = float(price.seconds(terms.share * len(terms.ids), len(terms.ids)))
        else:
            found, seconds = proposed.choice.found, proposed.choice.found.seconds
            self.outlook.observe(proposed.choice.value)
            self.width.observe(int(found.nodes.max()), terms.width)
            if terms.alike:
                self.even.compare(price, proposed.choice.value, terms.most, found.expected, seconds)
        self.outlook.settle(price, price.roots, proposed.expected, seconds, len(terms.ids), terms.most)


def _outcome(proposed: _Proposed, verified: Mapping[str, Verified]) -> tuple[Bools, Bools]:
    """Nodes that were verified and nodes that were accepted, [B, N]: the scheduler may have cut a tree or left a stream out."""
    kept = proposed.kept
    number = np.cumsum(kept, axis=1)  # of a kept node in the tree that was verified, the root 0
    seen = [verified.get(id) for id in proposed.terms.ids]
    nodes = np.array([v.nodes if v is not None and v.sound else 0 for v in seen])
    taken = np.zeros((len(kept), kept.shape[1] + 1), np.bool_)
    for b, v in enumerate(seen):
        if v is not None and v.sound:
            taken[b, list(v.path)] = True
    kept = kept & (number <= nodes[:, None])
    rows = (np.arange(len(kept)) * taken.shape[1])[:, None]
    return kept, kept & taken.take(number + rows)
