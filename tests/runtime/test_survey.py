"""The survey of a machine whose steps are graphs of fixed sizes: every edge, drafts by streams, long contexts, within its time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from runtime import measure, survey
from runtime.clock import StepClock, Times
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.curve import CostCurve, CurveKey
from runtime.measure import fit_seats, measure_curve, powers
from runtime.stats import EngineStats
from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from tests.language import scattered
from tests.scripted import ScriptedExecutor

AUTO = SpeculativeConfig(method="ddtree", tree_budget="auto")
KEY = CurveKey("scripted", "language", 1)
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 192)


class Graphs(ScriptedExecutor):
    """Steps sleep by bucket and context, drafts by streams; notes what was launched."""

    def __init__(self, **options: Any) -> None:
        super().__init__(guess=scattered(3), num_pages=600, max_rows=EDGES[-1], max_positions=512, **options)
        self.launched: list[tuple[int, int, int]] = []  # bucket, rows, committed tokens

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        return len(EDGES)

    def step(self, plan: StepPlan) -> StepResult:
        self.launched.append((plan.bucket, plan.m, int(plan.ctx.sum())))
        time.sleep(2e-4 + 4e-5 * plan.bucket + 4e-5 * int(plan.ctx.sum()))
        return super().step(plan)

    def draft(self, plan: DraftPlan) -> DraftLogits:
        time.sleep(1e-3 * len(plan.root))
        return super().draft(plan)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 192, "block_size": 4, "buckets": EDGES, **changes})


def measured(curve: CostCurve, context: int) -> list[int]:
    step = curve._steps[context]
    return step.edges[step.count > 0].tolist()


def test_every_edge_every_seat_and_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CONTEXTS", (900, 1 << 40))
    monkeypatch.setattr(survey, "LONG_CONTEXTS", (1600, 10**6))
    monkeypatch.setattr(measure, "CAPTURED_BUDGET_S", 60.0)
    run = Graphs()
    curve = measure_curve(run, config(), AUTO, KEY)
    assert set(measured(curve, 0)) == set(EDGES), "trees reach all but none is left to extrapolation"
    assert {8, 16, 32, 64, 128, 192} <= set(measured(curve, 1))
    assert max(ctx for *_, ctx in run.launched) < 10**5, "what no page holds is not tried"
    step = curve.step(np.array(EDGES), 0)
    assert step[-1] > 1.5 * step[0] and float(curve.step(64, 1700)) > 1.5 * float(curve.step(64, 0))
    assert 2.0 < curve.draft(8) / curve.draft(1) < 12.0 and float(curve.host.at(8, 56, True)) > 0
    assert all(bucket == min(m for m in EDGES if m >= rows) for bucket, rows, _ in run.launched)


@pytest.mark.parametrize("dead_s", [0.0, 2.0])
def test_what_dead_rows_cost_is_seen(dead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says 2 s for a live row."""
    run = Graphs()

    def read(clock: StepClock, stats: EngineStats) -> Times:
        bucket, rows, _ = run.launched[-1]
        return Times(clock.load, clock.drafted, 2.0 * rows + dead_s * (bucket - rows), 1e-3, 1e4)

    monkeypatch.setattr(survey, "LONG_CONTEXTS", ())
    monkeypatch.setattr(StepClock, "read", read)
    full = measure_curve(run, config(), AUTO, KEY).full
    assert any(bucket == 64 and rows == 48 for bucket, rows, _ in run.launched)
    assert full < 0.1 if dead_s == 0.0 else full > 0.95


def test_edges_beyond_trees_are_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of 63 nodes fill 128 rows; 192 take a prompt of what was written."""
    run = Graphs()
    curve = measure_curve(run, config(max_num_seqs=2), AUTO, KEY)
    assert set(measured(curve, 0)) == set(EDGES)
    assert any(bucket == 192 and rows == 192 for bucket, rows, _ in run.launched)


def test_without_a_drafter_plain_steps_and_prompts_are_run() -> None:
    run = Graphs()
    run.guess, run.limits = None, type(run.limits)(97, 192, 600, 4, 512)
    curve = measure_curve(run, config(), SpeculativeConfig(), KEY)
    assert set(measured(curve, 0)) == set(EDGES) and run.drafts == 0 and curve.draft(4) > 0


def test_time_runs_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CAPTURED_BUDGET_S", 0.05)
    run = Graphs()
    curve = measure_curve(run, config(), AUTO, KEY)
    assert len(run.launched) < 60, "a few of 0.5 ms or more"
    assert len(measured(curve, 0)) < len(EDGES)
    assert (np.diff(curve.step(np.array(EDGES))) >= 0).all(), "the rest is extrapolated"


def test_contexts_share_a_shape() -> None:
    curve = CostCurve((1, 8, 64), [(1.0, 2.0, 3.0)] * 2, key=KEY, contexts=(100, 1 << 40))
    for rows, seconds in ((1, 2.0), (8, 8.0), (64, 9.0)):
        curve.observe_step(rows, 0, seconds)
    curve.observe_step(8, 500, 16.0)
    curve.share_shape()
    assert curve.step(np.array([1, 8, 64]), 500).tolist() == [4.0, 16.0, 18.0]


def test_edges_and_seats() -> None:
    assert powers(tuple(range(1, 42))) == [1, 2, 4, 8, 16, 32, 41] and powers((1,)) == [1]
    assert fit_seats(config()) == (1, 2, 4, 8) and fit_seats(config(max_num_seqs=10)) == (1, 2, 4, 8, 10)
    assert fit_seats(config(buckets=(), max_num_seqs=3)) == (1, 2, 3)
