"""The CUDA worker over the CPU shim: whole generations equal the definition's, whatever dead rows hold, replay after replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.config import SpeculativeConfig
from runtime.graph import fields
from runtime.graph.audit import dot, group_ops
from runtime.graph.probe import Probe
from runtime.kernels_cu.array import DeviceArray
from runtime.plan import pack_plan
from runtime.speculate import NoSpeculation, TreeSpeculation
from runtime.types import DraftPlan, Request, SamplingParams, StepPlan, StepResult
from tests.device_plans import poison
from tests.plans import make_plan, page_table
from tests.runtime.graph.worlds import DEPTH, PAGE, VOCAB, Pair, tiny_model
from tests.worlds import Got, run

GAP = 0.05  # of two log-probabilities; logits here differ from the definition's by up to 0.02 (bfloat16 in another order)
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=6, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, top_k=40, max_tokens=6, logprobs=2),
    "penalties": SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, repetition_penalty=1.3, logit_bias={9: 4.0}, min_tokens=4),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pair(path, shim):
    return Pair(path, shim)


def requests_for(params: SamplingParams) -> list[Request]:
    prompts = [[3, 9, 17, 4], [4, 9, 17, 4, 22, 8, 90, 31, 7, 400, 211, 13, 5, 81], [5, 77]]
    return [Request(str(i), np.array(p, np.int32), params, seed=5 + i) for i, p in enumerate(prompts)]


def check_same(got: dict[str, Got], want: dict[str, Got], greedy: bool) -> int:
    """Equal tokens up to the first place where the definition's two best lie within GAP; how many were compared."""
    compared = 0
    for key, truth in want.items():
        for place, (mine, theirs) in enumerate(zip(got[key].tokens, truth.tokens, strict=False)):
            if mine != theirs:
                best, second = truth.logprobs[place].rank_logprobs
                assert greedy and best - second < GAP, (
                    f"{key}: token {place} is {mine}, the definition's {theirs}, its gap {best - second:.3f}"
                )
                break
            compared += 1
    return compared


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_generation_is_the_definitions(pair, sampling):
    """Chunks, decoding, DDTree: the device's text is the definition's, and speculation does not change it."""
    requests, params = requests_for(SAMPLING[sampling]), SAMPLING[sampling]
    want = run(pair.engine(pair.truth, NoSpeculation()), requests)
    plain = run(pair.engine(pair.cuda, NoSpeculation()), requests)
    drafted = run(pair.engine(pair.cuda, TreeSpeculation(pair.cuda, SpeculativeConfig(tree_budget=3))), requests)
    for got in (plain, drafted):
        assert check_same(got, want, params.greedy) > 12
        for key in want:
            assert got[key].finish == want[key].finish
    lps = [[(t.logprob, t.rank_logprobs) for t in world["0"].logprobs] for world in (plain, want)]
    np.testing.assert_allclose([a for a, _ in lps[0]], [a for a, _ in lps[1]], atol=GAP)


def random_plan(rng, pages, tokens: int = 3) -> StepPlan:
    """Two streams: a chain of `tokens` and a small tree, with some rows wanted."""
    parents = [list(range(-1, tokens - 1)), [-1, 0, 0]]
    plan = make_plan([rng.integers(0, VOCAB, len(p)) for p in parents], parents, [0, 0], pages, PAGE)
    wanted = np.array([tokens - 1, *range(tokens, plan.m)], np.int32)
    return replace(plan, out_rows=wanted, logprobs=np.array([2, 2], np.int32))


def equal(a: StepResult, b: StepResult) -> bool:
    names = ("target", "logp", "finite", "top_ids", "top_logp")
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name != "finite") for name in names)


def dirty(pair: Pair, value: int) -> None:
    """What earlier steps may have left: buffers and fields of any bytes, page tables that name pages of others; those hold NaN."""
    cuda, upload = pair.cuda, pair.cuda.driver.device.upload
    poison(cuda.backend, (), value)
    for held in cuda._fields:
        for name, place in held._places.items():
            room = np.full(-(-place.rows * max(place.columns, 1) * place.item_bytes // 16) * 16, value, np.uint8)
            upload(held._held[name], np.full(len(room) // 4, pair.pages - 1, np.int32) if name == "pages" else room)
    cache = pair.model.cache
    for layer in range(len(cache)):
        upload(cache[layer, (pair.pages - 1) * PAGE :].address, np.full((PAGE, cache.shape[2]), 0xFFFF, np.uint16))


def check_tail(pair: Pair, plan: StepPlan, name: str, rows: int) -> None:
    held = pair.cuda.host(DeviceArray(pair.cuda._plan._held[name], (rows,), "i32"))
    np.testing.assert_array_equal(held[: plan.m], getattr(plan, name))
    np.testing.assert_array_equal(held[plan.m :], -1)


@pytest.mark.parametrize("rows", [4, 12])
def test_dead_rows_stale_fields_and_replays_change_nothing(pair, rng, rows):
    plan = random_plan(rng, page_table(2, 2), tokens=1 if rows == 4 else 3)
    first = pair.cuda.step(plan)
    assert pair.cuda._steps.find(plan.m, len(plan.out_rows)).rows == rows and first.finite.all()
    truth = pair.truth.step(plan)
    np.testing.assert_allclose(first.logp, truth.logp, atol=GAP)
    for value in (0xFF, 0x00, 0x7E):
        dirty(pair, value)
        assert equal(pair.cuda.step(plan), first)
        for name in ("seq", "slot"):
            check_tail(pair, plan, name, rows)


@pytest.mark.parametrize("lost", ["seq", "slot"])
def test_mutation_a_dead_tail_without_its_fill_shows(path, shim, rng, monkeypatch, lost):
    """Rows that an earlier, larger step left would stay alive and write over the cache."""
    monkeypatch.setattr(fields, "_STEP_FILLS", {name: value for name, value in fields._STEP_FILLS.items() if name != lost})
    pair = Pair(path, shim, sizes=(12,))
    pages = page_table(2, 2)
    large, small = random_plan(rng, pages, tokens=9), random_plan(rng, pages, tokens=1)
    first = pair.cuda._steps.find(12).records[0]
    for plan in (large, small):  # the first node alone: the others would find more rows than the plan has
        pack_plan(plan, pair.cuda._layout, pair.cuda._plan.blob.host)
        first.run.run(0)
    with pytest.raises(AssertionError):
        check_tail(pair, small, lost, 12)


def test_drafts_are_the_definitions(pair, rng):
    pages = page_table(2, 2)
    plan = random_plan(rng, pages)
    for executor in (pair.truth, pair.cuda):
        executor.step(plan)
    taps = np.arange(3, dtype=np.int32)
    full = DraftPlan(np.array([7, 300], np.int32), np.array([3, 0], np.int32), pages, taps, taps, plan.slot[:3])
    want, got = pair.truth.draft(full), pair.cuda.draft(full)
    np.testing.assert_allclose(got.logp[:, :, 0], want.logp[:, :, 0], atol=GAP)
    assert got.ids.shape == want.ids.shape == (2, DEPTH, 4) and (got.ids[:, :, 0] == want.ids[:, :, 0]).mean() > 0.6
    dirty(pair, 0x7E)  # the taps with it: they have been read
    none = np.zeros(0, np.int32)
    roots = replace(full, tap_rows=none, tap_pos=none, tap_slot=none)
    again = pair.cuda.draft(roots)
    np.testing.assert_array_equal(again.ids, got.ids)
    np.testing.assert_array_equal(again.logp, got.logp)
    only = pair.cuda.draft(replace(full, root=none, pos=none, pages=np.zeros((0, 0), np.int32)))
    assert only.ids.shape == (0, DEPTH, 4) and pair.cuda._due is not None
    pair.cuda.draft(roots)
    assert pair.cuda._due is None


def test_steps_that_want_nothing_and_steps_too_large(pair, rng):
    plan = replace(random_plan(rng, page_table(2, 2)), out_rows=np.zeros(0, np.int32))
    assert pair.cuda.step(plan).target.shape == (0,)
    with pytest.raises(ValueError, match="13 rows; the largest size is 12"):
        pair.cuda.step(random_plan(rng, page_table(2, 2), tokens=10))
    bad = replace(plan, adjust_row=np.array([[3, 1], [1, 1]], np.int32), adjust_row_by=np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="adjust_row: entry 1 is of 1"):
        pair.cuda.step(bad)


def test_capture_takes_buckets_and_leaves_results_alone(path, shim, rng):
    pair = Pair(path, shim)
    engine = pair.engine(pair.cuda, NoSpeculation())
    plan = random_plan(rng, page_table(2, 2))
    before = pair.cuda.step(plan)
    with pytest.raises(ValueError, match=r"\[5\] are no buckets of this engine; \[1, 4, 12\] are"):
        engine.capture([5])
    assert engine.capture([12]) == 1 and engine.capture([12]) == 1 and equal(pair.cuda.step(plan), before)
    total = len(list(pair.cuda.programs()))
    assert engine.capture() == total and all(program.captured for program in pair.cuda.programs())
    assert equal(pair.cuda.step(plan), before)
    assert pair.engine(pair.truth, NoSpeculation()).capture() == 0


def test_taps_of_no_step_are_refused(path, shim):
    pair = Pair(path, shim, sizes=(12,))
    taps = np.zeros(1, np.int32)
    none = np.zeros(0, np.int32)
    with pytest.raises(RuntimeError, match="no step has run"):
        pair.cuda.draft(DraftPlan(none, none, np.zeros((0, 0), np.int32), taps, taps, taps))
    pair.cuda.close()


def test_the_audit_counts_every_launch(pair):
    audit = pair.cuda.audit(Probe(2, 5, VOCAB, pair.pages, PAGE), repeats=1)
    assert audit.steady and audit.arena_bytes == pair.cuda.backend.arena.nbytes
    kinds = {(p.kind, p.rows) for p in audit.programs}
    assert {("step", 1), ("step", 4), ("step", 12), ("context", 12), ("block", 3)} <= kinds
    for found, program in zip(audit.programs, pair.cuda.programs(), strict=True):
        assert found.launches == len(program.records) and found.us is None
        assert (found.ops[0].op, found.ops[-1].op) == ("plan_read", "publish")
        assert sum(len(records) for records in group_ops(program.records).values()) == found.launches
        text = dot(program)
        assert text.count("->") == found.launches - 1 and text.count("label=") == found.launches
    step = next(p for p in audit.programs if (p.kind, p.rows) == ("step", 12))
    floors = {op.op: op.floor_us for op in step.ops}
    assert floors["linear"] > 0 and floors["moe_w4"] > 0 and step.as_json()["launches"] == step.launches
    calls = {op.op: op.calls for op in step.ops}
    assert calls["tree_mla"] == 2 and calls["moe_w4"] == 2 and calls["linear_f32"] == 1
