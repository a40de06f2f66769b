"""Speculation under one budget: an engine over scripted models whose steps cost what a test says."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from runtime import allocate as subject
from runtime.allocate import BudgetSpeculation
from runtime.config import SpeculativeConfig
from runtime.curve import CostCurve, CurveKey
from runtime.engine import Engine
from runtime.speculate import Load, Root, StepWatcher, Taps, TreeSpeculation, Verified
from runtime.stats import EngineStats
from runtime.tree import check_tree
from tests.runtime.test_speculate import Drafter, logits_for, root
from tests.scripted import BrokenPlan, ScriptedExecutor, make_engine, make_request, run_all, scattered
from tests.waits import turns
from tests.workloads import REQUESTS, differing, executor

AUTO = SpeculativeConfig(method="ddtree", tree_budget="auto")
CHEAP = (1.0, 1.0001, 1.0002, 1.0003)
DEAR = (1.0, 8.0, 64.0, 512.0)


def curve(seconds: tuple[float, ...] = CHEAP, draft_s: float = 0.01) -> CostCurve:
    return CostCurve((8, 16, 32, 64), seconds, key=CurveKey("test", "none", 1), draft_s=(draft_s,))


def frozen(held: CostCurve, monkeypatch: pytest.MonkeyPatch) -> CostCurve:
    """The curve as it is: what scripted steps take is not learned."""
    for name in ("observe_step", "observe_draft"):
        monkeypatch.setattr(held, name, lambda *args: None)
    monkeypatch.setattr(held.host, "observe", lambda *args: None)
    return held


def engine(run: ScriptedExecutor, held: CostCurve, **config: Any) -> tuple[Engine, BudgetSpeculation]:
    spec = BudgetSpeculation(run, AUTO, held)
    return make_engine(run, speculator=spec, **config), spec


@pytest.mark.parametrize("seconds", [CHEAP, DEAR, (1.0, 1.1, 3.0, 3.1)])
@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 3}, {"num_pages": 30, "max_num_batched_tokens": 24}])
def test_text_equals_plain_decoding(seconds: tuple[float, ...], config: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = engine(executor(guess=scattered(5)), frozen(curve(seconds), monkeypatch), **config)
    assert differing(run_all(made, REQUESTS)) == []


@pytest.mark.parametrize("config", [{}, {"num_pages": 30, "max_num_batched_tokens": 24}])
def test_text_equals_plain_decoding_where_streams_share(config: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, spec = engine(executor(guess=scattered(5)), frozen(curve(), monkeypatch), **config)
    monkeypatch.setattr(spec.even, "share", lambda price, streams, most: (min(3, most // streams), 1.0))
    assert differing(run_all(made, REQUESTS)) == []
    shared = [r for r in made.stats().budget_records if len(r.nodes) > 1 and set(r.nodes) == {3}]
    assert len(shared) > 3 and spec.calibration.accepted.sum() > 10


def test_streams_that_weigh_differently_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, asked = BudgetSpeculation(Drafter(), AUTO, curve()), list[int]()
    monkeypatch.setattr(spec.even, "share", lambda price, streams, most: asked.append(streams) or (2, 1.0))
    for weights, size in (((1.0, 1.0), 4), ((1.0, 2.0), 13)):
        roots = [Root(r.id, r.tokens, r.pages, 40, r.depth, weight=w) for r, w in zip((root(1), root(2)), weights, strict=True)]
        spec.before_step(Load(2, 0, 64, 16, 0), EngineStats())
        assert sum(len(t) - 1 for t in spec.propose(roots, Taps.none(), EngineStats())()) >= size
    assert asked == [2]


def test_cheap_rows_are_filled_and_dear_ones_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {}
    for name, seconds in (("cheap", CHEAP), ("dear", DEAR)):
        made, _ = engine(executor(guess=scattered(5)), frozen(curve(seconds), monkeypatch))
        run_all(made, [make_request(f"r{i}", [i + 1, 2, 3], max_tokens=40) for i in range(4)])
        records = [r for r in made.stats().budget_records if len(r.nodes) == 4]
        rows[name] = sum(r.rows for r in records) / len(records)
    assert rows["cheap"] > 25 and rows["dear"] <= 8, rows


def test_records_tell_what_was_expected_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    made, spec = engine(executor(guess=scattered(5)), frozen(curve(), monkeypatch))
    assert isinstance(spec, StepWatcher) and not isinstance(TreeSpeculation(Drafter(), SpeculativeConfig(method="ddtree")), StepWatcher)
    got = run_all(made, [make_request(f"r{i}", [i + 1, 2, 3], max_tokens=30) for i in range(4)])
    stats = made.stats()
    assert stats.budget_steps == len(stats.budget_records) == stats.steps
    for record in stats.budget_records:
        assert record.bucket >= record.rows >= len(record.nodes) + sum(record.nodes)
        assert record.realised >= len(record.nodes) and record.expected >= len(record.nodes)
    emitted = sum(len(e.tokens) for emissions in got.values() for e in emissions)
    assert emitted - 4 <= stats.realised_tokens <= emitted + 4 * spec.depth, "the prompts' first tokens and what is cut at the end"
    assert stats.draft_tokens == sum(sum(r.nodes) for r in stats.budget_records)
    copy = made.stats()
    made._stats.budget_records.clear()
    assert copy.budget_records, "stats are copies"


def test_no_draft_where_none_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    run = executor(guess=scattered(5))
    made, _ = engine(run, frozen(curve(draft_s=500.0), monkeypatch))
    asked: list[int] = []
    draft = run.draft
    monkeypatch.setattr(run, "draft", lambda plan: asked.append(len(plan.root)) or draft(plan))
    assert differing(run_all(made, REQUESTS)) == []
    stats = made.stats()
    assert stats.skipped_drafts > 0.8 * stats.budget_steps
    assert asked.count(0) > 0.7 * len(asked), "committed tokens still reach the drafter"


def test_a_step_teaches_the_curve_and_the_calibration() -> None:
    """Costs are the wall time that step and draft were in flight; a stream that was cut or lost counts for what was verified."""
    drafter = Drafter()
    spec = BudgetSpeculation(drafter, AUTO, curve())
    stats = EngineStats()
    roots = [root(1, nodes=8), root(2, nodes=8), root(3, nodes=8)]
    spec.before_step(Load(3, 0, 64, 16, 100), stats)
    trees = spec.propose(roots, Taps.none(), stats)()
    for tree in trees:
        check_tree(tree)
    assert sum(len(t) - 1 for t in trees) == 24, "all that the roots have room for together"
    stats.take_off()
    time.sleep(0.02)
    stats.land()
    first_child = int(np.flatnonzero(trees[0].parent == 0)[0])
    verified = {"r1": Verified(len(trees[0]) - 1, [0, first_child], True), "r2": Verified(1, [0], True)}
    spec.after_step(27, 32, verified, 41.5, stats)
    time.sleep(0.05)
    assert not stats.budget_records and not spec.calibration.accepted.any(), "all of it can wait until the device is busy"
    spec.learn()
    assert stats.budget_records[-1].experts == 41.5
    assert 0.02 <= float(spec.curve.step(27)) < 0.2 and spec.curve.draft(3) < 0.2 and 0 < float(spec.curve.host.at(3, 24, True)) < 0.05
    calibration = spec.calibration
    assert calibration.accepted.sum() == pytest.approx(1.0)
    children = [int(t) for t in np.flatnonzero(trees[0].parent == 0)]
    tried = sum(np.exp(logits_for(1)[1][0, : len(children)]))
    below = [int(t) for t in np.flatnonzero(trees[0].parent == first_child)]
    tried += sum(np.exp(logits_for(1)[1][1, : len(below)])) + np.exp(logits_for(2)[1][0, 0])
    assert calibration.promised.sum() == pytest.approx(tried, rel=1e-3), "children of accepted nodes only, and r3 not at all"
    unsound = {"r1": Verified(3, [0, 1], False)}
    spec.propose(roots, Taps.none(), stats)()
    spec.after_step(27, 32, unsound, 0.0, stats)
    spec.learn()
    assert calibration.accepted.sum() <= 1.0, "a row that was not finite teaches nothing"


def test_rooms_of_one_sequence_may_go_to_another() -> None:
    """`nodes` is an even share of the step, `most` what the sequence itself has room for."""
    spec = BudgetSpeculation(Drafter(), AUTO, curve())
    tight = [Root(r.id, r.tokens, r.pages, 4, r.depth, most=most) for r, most in ((root(1), 1), (root(2), 40), (root(3), 40))]
    trees = spec.propose(tight, Taps.none(), EngineStats())()
    assert len(trees[0]) <= 2 and sum(len(t) - 1 for t in trees) == 12
    assert max(len(t) - 1 for t in trees) > 4, "mutation: capping each at its even share"


def test_prompts_and_other_rows_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 14 prompt rows in a bucket of 16 two nodes are free; without them 14 are."""
    sizes = []
    for prompt in (0, 14):
        spec = BudgetSpeculation(Drafter(), AUTO, frozen(curve((1.0, 1.01, 90.0, 900.0)), monkeypatch))
        spec.before_step(Load(1, prompt, 64, 16, 0), EngineStats())
        [tree] = spec.propose([root(1, nodes=40)], Taps.none(), EngineStats())()
        sizes.append(len(tree) - 1)
    assert sizes == [15, 1]


def test_a_long_prompt_beside_decoding_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four streams alone stay in the cheap bucket of 8. A prompt opens the one of 64: nodes that pay for a prompt row go along."""
    made, _ = engine(executor(guess=scattered(1)), frozen(curve((1.0, 3.0, 3.01, 3.02)), monkeypatch), max_num_batched_tokens=64)
    requests = [make_request(f"r{i}", [i + 1, 2, 3], max_tokens=60) for i in range(4)]
    got: dict[str, list[Any]] = {r.id: [] for r in requests}
    for request in requests:
        made.submit(request, got[request.id].append)
    for _ in range(6):
        made.step()
    alone = made.stats().budget_records[-1]
    assert alone.bucket == 8 and len(alone.nodes) == 4
    made.submit(make_request("long", np.arange(100) % 90, max_tokens=2))
    for _ in turns(lambda: made.stats().prompt_tokens < 112, "a prompt that is not read"):
        made.step()
    beside = made.stats().budget_records[-1]
    assert beside.rows == 64 and len(beside.nodes) == 4, "the prompt fills what the streams leave"
    assert sum(beside.nodes) > 2 * sum(alone.nodes), "mutation: pricing them as if they had opened the bucket"
    assert beside.rows - 4 - sum(beside.nodes) >= 16, "a quarter of the rows is the prompts'"


def test_steps_of_prompts_do_not_teach_what_trees_cost() -> None:
    spec, stats = BudgetSpeculation(Drafter(), AUTO, curve()), EngineStats()
    for prompt, seen in ((50, 0), (30, 1)):
        spec.before_step(Load(4, prompt, 64, 16, 0), stats)
        stats.take_off()
        time.sleep(1e-4)
        stats.land()
        spec.after_step(4 + prompt, 64, {}, 0.0, stats)
        spec.learn()
        assert spec.curve._steps[0].count[-1] == seen


def test_a_wrong_outcome_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: trees whose kept nodes are not closed break the plan's protocol."""

    def holes(forest: Any, kept: np.ndarray) -> Any:
        trees = subject_prune(forest, kept)
        for tree in trees:
            tree.parent[1:] = 0
        return trees

    subject_prune = subject.prune
    monkeypatch.setattr(subject, "prune", holes)
    made, _ = engine(executor(guess=scattered(5)), curve())
    with pytest.raises((BrokenPlan, AssertionError)):
        assert differing(run_all(made, REQUESTS[:12])) == []


def test_what_it_needs_is_said() -> None:
    with pytest.raises(ValueError, match="'auto' needs a cost curve"):
        TreeSpeculation(Drafter(), AUTO)

    class Without(Drafter):
        limits = type(Drafter.limits)(100, 64, 32, 4, 256, 0)

    with pytest.raises(ValueError, match="needs a drafter"):
        BudgetSpeculation(Without(), AUTO, curve())
