"""Full-size planning against independently computed figures of Kimi K2.6."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from model import dflash, kimi_k26
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime.checked import CheckedBackend
from runtime.hw import HARDWARE
from runtime.kernels_np import NumpyBackend
from runtime.null import NullBackend, NullComm, ShapeOnly
from runtime.planning import memory_per_rank, plan_buckets, plan_draft, plan_step
from runtime.shape_model import PAGE_SIZE, shape_drafter, shape_plan, shape_weights, walk_step
from runtime.shapes import ShapeError
from tests.plans import make_plan, page_table

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
H200 = HARDWARE["h200"]


def read_json(path: str) -> dict:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def k26() -> kimi_k26.Config:
    return kimi_k26.Config.from_json(read_json("model/configs/kimi-k26.json"))


@pytest.fixture(scope="module")
def drafter() -> dflash.Config:
    return dflash.Config.from_json(read_json("model/configs/kimi-k26-dflash.json"))


# GB by kind, whole model: computed by hand from the published tensor shapes.
WHOLE_GB = {
    "expert codes": 507.3, "expert scales": 63.4, "attention": 12.34, "shared experts": 5.28, "dense layers": 0.79, "router": 0.33,
}  # fmt: skip


def test_whole_model_by_kind(k26: kimi_k26.Config) -> None:
    memory = memory_per_rank(k26, 1)
    for kind, gb in WHOLE_GB.items():
        assert memory.weights[kind] / 1e9 == pytest.approx(gb, rel=0.01), kind
    assert (memory.weights["embedding"] + memory.weights["head"]) / 1e9 == pytest.approx(4.70, rel=0.01)
    assert memory.weight_bytes / 1e9 == pytest.approx(594.2, rel=0.001)


def test_memory_of_a_tp8_rank(k26: kimi_k26.Config) -> None:
    memory = memory_per_rank(k26, 8)
    assert memory.weight_bytes / 1e9 == pytest.approx(76.2, rel=0.002)
    assert memory.kv_token_bytes == 70_272
    assert memory_per_rank(k26, 4).weight_bytes / 1e9 >= 148.6


def test_memory_is_the_checkpoints_tensors(k26: kimi_k26.Config) -> None:
    """At TP 1 the kinds sum to the bytes of every tensor of the checkpoint, but for weight_shape and the rotary table."""
    width = {"bf16": 2, "f32": 4, "i32": 4}
    stored = 0
    for name, (shape, dtype) in kimi_k26.tensors(k26).items():
        if not name.endswith("weight_shape"):
            size = 1
            for n in shape:
                size *= n
            stored += size * width[dtype]
    table = k26.max_positions * k26.rope_dim * 4
    assert memory_per_rank(k26, 1).weight_bytes - table == stored


def test_tokens_that_fit(k26: kimi_k26.Config, drafter: dflash.Config) -> None:
    assert memory_per_rank(k26, 1).tokens_that_fit(H200) == 0
    alone, both = memory_per_rank(k26, 8), memory_per_rank(k26, 8, drafter)
    assert alone.chunk_bytes == 1 << 30, "262,144 keys of 8 heads, expanded"
    assert alone.tokens_that_fit(H200, 0.9) == int((0.9 * 150.1e9 - alone.weight_bytes - (1 << 30)) // 70_272)
    assert memory_per_rank(k26, 1, drafter).weights["drafter"] / 2**30 == pytest.approx(6.48, abs=0.01)
    assert both.kv_token_bytes == 70_272 + 24_576 // 8 and memory_per_rank(k26, 1, drafter).kv_token_bytes == 70_272 + 24_576
    assert both.tokens_that_fit(H200, 0.9) == int((0.9 * 150.1e9 - both.weight_bytes - (1 << 30)) // (70_272 + 3072))


# Rows -> distinct experts, GB read by a TP8 rank, ms at 4.54 TB/s: weights alone, computed by hand.
STEP_TABLE = {1: (8, 6.0, 1.33), 2: (15.8, 7.5, 1.65), 4: (31, 10.3, 2.27), 8: (59.5, 15.6, 3.44), 16: (110, 24.9, 5.5)}


@pytest.mark.parametrize("rows", STEP_TABLE)
def test_step_of_a_tp8_rank(k26: kimi_k26.Config, rows: int) -> None:
    _, gb, ms = STEP_TABLE[rows]
    step = plan_step(k26, 8, rows, 0, H200)
    assert step.cost.bytes / 1e9 == pytest.approx(gb, rel=0.02)
    assert step.floor_us / 1e3 == pytest.approx(ms, rel=0.02)


@pytest.mark.parametrize(("rows", "gb"), [(16, 24.9), (32, 39.5), (64, 57.3)])
def test_step_without_activations(k26: kimi_k26.Config, rows: int, gb: float) -> None:
    """Bytes of a step are linear in M but for the experts, so activations are what a row adds at a fixed union."""
    one, two = (plan_step(k26, 8, m, 0, H200, distinct=8).cost.bytes for m in (1, 2))
    assert (plan_step(k26, 8, rows, 0, H200).cost.bytes - rows * (two - one)) / 1e9 == pytest.approx(gb, rel=0.005)


def test_fixed_part_of_a_step(k26: kimi_k26.Config) -> None:
    step = plan_step(k26, 8, 1, 0, H200)
    gb = {row.dims: row.cost.read_bytes / 1e9 for row in step.table}
    assert gb["K=7168 N=2112"] == pytest.approx(1.85, rel=0.01), "replicated q_a and kv_a"
    assert gb["H=7168 k=8 E=384 F=256"] == pytest.approx(1.49, rel=0.01), "routed experts"
    assert gb["H=7168 E=384 k=8"] == pytest.approx(0.33, rel=0.01), "router"


def test_context_is_read_once_for_each_stream(k26: kimi_k26.Config) -> None:
    empty, full = (plan_step(k26, 8, 16, ctx, H200, streams=2).cost for ctx in (0, 10_000))
    assert full.read_bytes - empty.read_bytes == pytest.approx(2 * 10_000 * 70_272)
    assert full.flops - empty.flops == pytest.approx(61 * 2 * 8 * 16 * 10_000 * (576 + 512))


def test_collectives(k26: kimi_k26.Config) -> None:
    links = {row.op: row for row in plan_step(k26, 8, 64, 0, H200).table if row.is_link}
    assert links["all_reduce"].count == 2 * 61 + 1
    assert links["all_reduce"].cost.read_bytes == 123 * 2 * 64 * 14_336 * 7 / 8
    assert links["all_gather"].cost.read_bytes == 64 * 8 * 16 * 7 / 8, "a row's best tokens, not its logits"
    assert not [row for row in plan_step(k26, 1, 64, 0, H200).table if row.is_link]
    assert plan_step(k26, 1, 64, 0, H200).link_us == 0


def test_pricing_by_substitution_equals_walking(k26: kimi_k26.Config) -> None:
    """One walk serves every bucket: a walk with 24 rows of 3 streams counts the same calls as the priced table assumes."""
    ops, comm = NullBackend(), NullComm(8)
    cache = ops.zeros((k26.layers, 2 * PAGE_SIZE, k26.cache_width))
    kimi_k26.forward(ops, comm, k26, shape_weights(k26, 8), shape_plan(24, 3), cache, PAGE_SIZE)
    walked = {(call.op, tuple((n, v) for n, v in call.symbols if n not in "MIBn")): count for call, count in ops.calls.items()}
    priced = {(call.op, tuple((n, v) for n, v in call.symbols if n not in "MIBn")): count for call, count in walk_step(k26, 8).ops}
    assert walked == {key: count for key, count in priced.items() if key[0] != "sample"}
    assert all(dict(call.symbols).get("M", 24) == 24 for call in ops.calls)


def test_a_model_that_does_not_fit_together_is_found_at_full_size(k26: kimi_k26.Config) -> None:
    weights = shape_weights(k26, 8)
    wrong = dataclasses.replace(weights.layers[7], o=ShapeOnly((7168, 8192), "bf16"))
    broken = dataclasses.replace(weights, layers=(*weights.layers[:7], wrong, *weights.layers[8:]))
    with pytest.raises(ShapeError, match=r"linear: K is 1024 in x \[4, 1024\] but 8192 in w \[7168, 8192\]"):
        kimi_k26.forward(NullBackend(), NullComm(8), k26, broken, shape_plan(4, 1), ShapeOnly((61, 16, 576), "bf16"), PAGE_SIZE)


def test_bad_questions_are_refused(k26: kimi_k26.Config) -> None:
    for arguments, said in (
        ({"streams": 5, "rows": 4}, "streams 5, rows 4"),
        ({"rows": 0}, "rows 0"),
        ({"ctx": -1}, "ctx -1"),
        ({"distinct": 4}, "between 8 and 384"),
        ({"tp": 3}, "tensor_parallel_size 3"),
    ):
        with pytest.raises(ValueError, match=said):
            plan_step(k26, **{"tp": 8, "rows": 4, "ctx": 0, "hw": H200, **arguments})


def test_drafter(k26: kimi_k26.Config, drafter: dflash.Config) -> None:
    step = plan_draft(drafter, k26, 1, 0, H200)
    weights = 2 * 3.48e9 + 163_840 * 7168 * 2
    context_twice = 6 * 2 * 7168 * 1024 * 2  # key and value projections, once for context and once for the block
    assert step.cost.read_bytes == pytest.approx(weights + context_twice, rel=0.01)
    assert step.rows == 8 and not [row for row in step.table if row.is_link]
    held = sum(ShapeOnly(shape, dtype).nbytes for shape, dtype in dflash.tensors(drafter).values())
    w = shape_drafter(drafter, 1)
    layer = sum(getattr(w.layers[0], n).nbytes for n in ("input_norm", "q", "k", "v", "o", "q_norm", "k_norm", "post_norm"))
    layer += w.layers[0].mlp.gate_up.nbytes + w.layers[0].mlp.down.nbytes
    assert held == 6 * layer + w.fc.nbytes + w.hidden_norm.nbytes + w.norm.nbytes


def test_a_cut_drafter(k26: kimi_k26.Config, drafter: dflash.Config) -> None:
    """Heads and width over 8 ranks, the merging of taps on each; two sums a layer, the embedding's, and K tokens of each rank."""
    merging = 7168 * 6 * 7168 * 2
    whole, eighth = (memory_per_rank(k26, tp, drafter).weights["drafter"] for tp in (1, 8))
    assert eighth == pytest.approx(merging + (whole - merging) / 8, rel=0.001)
    step = plan_draft(drafter, k26, 8, 0, H200)
    context_twice = 6 * 2 * 7168 * 128 * 2
    assert step.cost.read_bytes == pytest.approx(eighth + 163_840 * 7168 * 2 / 8 + context_twice, rel=0.02)
    links = {row.op: row.count for row in step.table if row.is_link}
    assert links == {"all_reduce": 13, "all_gather": 1}
    assert drafter.part(16) is drafter and memory_per_rank(k26, 16, drafter).weights["drafter"] == whole, "8 key heads"


def test_one_walk_of_a_size_prices_every_bucket(k26: kimi_k26.Config) -> None:
    """17 buckets at four sizes in 0.1 s, for a walk takes 13 ms and there are four."""
    walk_step.cache_clear()
    tables = {tp: (memory_per_rank(k26, tp), plan_buckets(k26, tp, BUCKETS, 4096, H200)) for tp in (1, 2, 4, 8)}
    assert walk_step.cache_info().misses == 4
    for _, steps in tables.values():
        assert [step.rows for step in steps] == list(BUCKETS)
        floors = [step.floor_us for step in steps]
        assert floors == sorted(floors) and all(f > 0 for f in floors)
    for wide, narrow in ((1, 2), (2, 4), (4, 8)):
        assert all(a.floor_us > b.floor_us for a, b in zip(tables[wide][1], tables[narrow][1], strict=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("tp", [1, 2])
def test_planned_memory_is_what_loading_takes(tiny: Checkpoint, tp: int) -> None:
    """The shapes made from a config alone hold the bytes that the loader hands to a backend for a real checkpoint."""
    c = kimi_k26.Config.from_json(tiny.config)
    ops = NullBackend()
    loaded = kimi_k26.load(tiny, c, ops, 0, tp, c.max_positions)
    assert memory_per_rank(c, tp).weight_bytes == ops.weight_bytes
    assert {f.name: getattr(loaded.layers[1], f.name).shape for f in dataclasses.fields(loaded.layers[1]) if f.name != "mlp"} == {
        f.name: getattr(shape_weights(c, tp).layers[1], f.name).shape for f in dataclasses.fields(loaded.layers[1]) if f.name != "mlp"
    }


def test_numpy_takes_the_planned_calls(tiny: Checkpoint) -> None:
    """The forward over real arrays passes the shape checks and makes the calls that planning prices."""
    c = kimi_k26.Config.from_json(tiny.config)
    plan = make_plan([[1, 2]], [[-1, 0]], [0], page_table(1, 1))
    numpy_backend, null = NumpyBackend(), NullBackend()
    checked = CheckedBackend(numpy_backend)
    weights = kimi_k26.load(tiny, c, checked, 0, 1, c.max_positions)
    cache = checked.zeros((c.layers, 2 * PAGE_SIZE, c.cache_width))
    logits, _ = kimi_k26.forward(checked, NullComm(1), c, weights, plan, cache, PAGE_SIZE)
    assert np.isfinite(logits).all() and logits.shape == (2, c.vocab)
    kimi_k26.forward(null, NullComm(1), c, shape_weights(c, 1), shape_plan(2, 1), null.zeros(cache.shape), PAGE_SIZE)
    planned = [(call, count) for call, count in walk_step(c, 1).ops if call.op != "sample"]
    assert planned == list(null.calls.items())
    slipped = dataclasses.replace(weights, norm=weights.norm.astype(np.float64))
    with pytest.raises(ShapeError, match=r"w .* is float64"):
        kimi_k26.forward(checked, NullComm(1), c, slipped, plan, cache, PAGE_SIZE)
