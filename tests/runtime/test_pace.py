"""Admission under a latency target: seats and chunks by hand, then engines over a curve that is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime import LLM, SamplingParams, measure
from runtime.allocate import BudgetSpeculation, TimedDecoding
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.curve import CostCurve, CurveKey
from runtime.loading import fit_speculation
from runtime.outlook import POOL, Outlook
from runtime.pace import LEAST_CHUNK, Pace
from tests.language import make_request, scattered
from tests.runtime.test_allocate import frozen
from tests.scripted import ScriptedExecutor, make_engine, run_all
from tests.workloads import REQUESTS, differing

KEY = CurveKey("test", "none", 1)
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = tuple(0.010 + 0.001 * m for m in EDGES)


def curve(**options: Any) -> CostCurve:
    return CostCurve(EDGES, SECONDS, key=KEY, **options)


def test_seats_by_hand() -> None:
    """S streams decode plainly in 10 + bucket(S) ms: 25 ms allow the bucket of 8, 26 ms that of 16."""
    assert [Pace(t / 1e3, curve()).seats(0, 64) for t in (10.5, 11.5, 25.0, 26.5, 1e4)] == [1, 1, 8, 16, 64]
    assert Pace(0.025, curve()).seats(7, 64) == 8 and Pace(0.025, curve()).seats(8, 64) == 8
    assert Pace(0.025, curve()).seats(40, 64) == 40, "nobody who runs loses a seat"
    assert Pace(9.0, curve()).seats(3, 3) == 3


def test_trees_that_are_accepted_make_room() -> None:
    """With three sure nodes a stream emits four tokens a step: a target that plain decoding misses holds."""
    sure = Outlook()
    sure.observe(np.full((POOL, 3), 1.0))
    plain, trees = Pace(0.020, curve()), Pace(0.020, curve(), sure)
    assert plain.tpot(16) == pytest.approx(0.026) and trees.tpot(16) == pytest.approx(0.074 / 4)
    assert plain.seats(8, 64) == 8 and trees.seats(8, 64) == 16
    poor = Outlook()
    poor.observe(np.full((POOL, 3), 0.001))
    assert Pace(0.020, curve(draft_s=(0.5,)), poor).tpot(16) == pytest.approx(0.026), "no drafts where they do not pay"


def test_longer_contexts_take_fewer_streams() -> None:
    held = CostCurve(EDGES, [SECONDS, tuple(3 * s for s in SECONDS)], key=KEY, contexts=(1000, 1 << 40))
    for rows in EDGES:
        held.observe_step(rows, 0, SECONDS[EDGES.index(rows)])
        held.observe_step(rows, 2000, 3 * SECONDS[EDGES.index(rows)])
    pace = Pace(0.030, held)
    assert pace.seats(4, 64, 4 * 10) == 12 and pace.seats(4, 64, 4 * 240) == 4, "one more takes them past 1,000 tokens"


def test_chunks_by_hand() -> None:
    """8 streams, 18 ms a step: 80 ms allow 64 rows, 56 of them a prompt's."""
    assert Pace(0.080, curve()).chunk(8, 256) == 56
    assert Pace(10.0, curve()).chunk(8, 200) == 200 and Pace(0.015, curve()).chunk(8, 256) == LEAST_CHUNK
    sure = Outlook()
    sure.observe(np.full((POOL, 3), 1.0))
    assert Pace(0.080, curve(), sure).chunk(8, 256) == 256 - 32, "four tokens a step leave 320 ms for it"


def seats_seen(target_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, bool]:
    """Most decoding streams and most prompt rows beside any, and whether all texts were right."""
    run = ScriptedExecutor(num_pages=1200, max_rows=128, max_positions=256)
    held = frozen(CostCurve(EDGES[:-1], [2e-3 + 1e-4 * m for m in EDGES[:-1]], key=KEY), monkeypatch)
    engine = make_engine(run, speculator=TimedDecoding(held), max_num_seqs=32, max_num_batched_tokens=128, pace=Pace(target_s, held))
    got = run_all(engine, REQUESTS)
    decoding = [np.count_nonzero(np.bincount(p.seq, minlength=len(p.ctx)) == 1) for p in run.plans]
    beside = [p.m - d for p, d in zip(run.plans, decoding, strict=True) if d > 4]
    return max(decoding), max(beside), differing(got) == []


def test_an_engine_holds_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests, all at once: a tight target runs few at a time in short chunks, a loose one all seats; text is the same."""
    tight, loose = (seats_seen(target_s, monkeypatch) for target_s in (4.5e-3, 1.0))
    assert tight[2] and loose[2]
    assert tight[:2] == (16, LEAST_CHUNK) and loose[0] > 24 and loose[1] > 90


def test_what_it_needs() -> None:
    config = EngineConfig(tpot_target_ms=20.0)
    for speculative in ({"method": "none"}, {"method": "ddtree", "tree_budget": "auto"}):
        config.check_speculation(SpeculativeConfig.parse(speculative))
    for bad, text in (({"method": "dflash"}, "together with dflash"), ({"tree_budget": 8}, "together with ddtree with tree_budget 8")):
        with pytest.raises(ValueError, match=f"tpot_target_ms: 20 {text}"):
            config.check_speculation(SpeculativeConfig.parse(bad))


def test_a_tree_that_nobody_chose_is_auto() -> None:
    for paced, budget in ((True, "auto"), (False, 7)):
        assert fit_speculation(SpeculativeConfig(method="ddtree"), paced=paced).tree_budget == budget
    assert fit_speculation(SpeculativeConfig(method="ddtree", tree_budget=3), paced=True).tree_budget == 3


@pytest.mark.parametrize("method", ["none", "ddtree"])
def test_the_option_reaches_the_engine(method: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measure, "BUDGET_S", 0.3)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "tpot_target_ms": 0.001}
    speculative = None if method == "none" else {"method": method}
    llm = LLM("demo", speculative_config=speculative, **options)
    assert isinstance(llm.loaded.engine._cycle._speculator, TimedDecoding if method == "none" else BudgetSpeculation)
    got = llm.generate(["def add(a, b):"] * 3, SamplingParams(temperature=0.0, max_tokens=6))
    assert len({o.outputs[0].token_ids for o in got}) == 1 and llm.loaded.engine.stats().seats == 1
    with pytest.raises(ValueError, match="needs tree_budget 'auto'"):
        LLM("demo", speculative_config={"tree_budget": 4}, tpot_target_ms=5.0)


def test_make_request_runs_alone_under_any_target() -> None:
    run = ScriptedExecutor(guess=scattered(3), num_pages=64, max_rows=64)
    held = curve()
    spec = BudgetSpeculation(run, SpeculativeConfig(method="ddtree", tree_budget="auto"), held)
    engine = make_engine(run, speculator=spec, pace=Pace(1e-9, held, spec.outlook))
    got = run_all(engine, [make_request(f"r{i}", [1, 2, i], max_tokens=20) for i in range(5)])
    assert all(sum(len(e.tokens) for e in emissions) == 20 for emissions in got.values())
    assert max(len(p.ctx) for p in run.plans) == 1, "one at a time, and every one is served"
