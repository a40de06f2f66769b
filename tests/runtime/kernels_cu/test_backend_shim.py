"""The whole tiny model through the CUDA backend on the CPU shim, against the definition in bfloat16: chunks, trees, drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.tiny import make_tiny
from runtime.kernels_cu import chunk_attention
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import Recorder
from runtime.ops import OPS
from tests.compare import check_bitwise
from tests.device_plans import poison
from tests.plans import make_plan, page_table
from tests.shim_device import ShimDevice, shim_map
from tests.twin import TREE, Twin, check_story, story

SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "q_lora_rank": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
    "n_routed_experts": 16, "vocab_size": 64, "draft_num_hidden_layers": 1, "draft_num_attention_heads": 2,
    "draft_num_key_value_heads": 1, "draft_intermediate_size": 64, "draft_block_size": 4,
}  # fmt: skip
VOCAB = SIZES["vocab_size"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=3, **SIZES)


@pytest.fixture
def make(shim, path):
    usual = {"positions": 48, "pages": 9, "page_size": 16, "streams": 3}
    return lambda **options: Twin(path, ShimDevice(shim), **usual | options)


def test_it_has_the_vocabulary_and_nothing_else():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(CudaBackend) - {"name"} == set(OPS)
    assert not public(Recorder) & set(OPS)
    assert all(getattr(CudaBackend, name).__name__ == name for name in OPS)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_model_is_the_definitions(make, invariant):
    twin = make(invariant=invariant)
    check_story(twin, VOCAB)
    assert twin.ops.arena.nbytes and twin.ops.weight_bytes


@pytest.fixture
def expanding(monkeypatch):
    """The shim takes long chunks in the un-absorbed form, as Hopper does."""
    monkeypatch.setattr(chunk_attention, "ARCH", ShimDevice.arch)
    monkeypatch.setattr(chunk_attention, "tensor_map", shim_map)


CHUNKED = {"buckets": (192, 16, 4), "chunk": 172}  # a row more than `ChunkShape.least`


@pytest.mark.parametrize("dropped", ["", "split_chunks", "chunk_attention"])
def test_a_long_chunk_is_the_definitions(make, expanding, dropped):
    """Un-absorbed here, absorbed there; and both ops take part, and matter."""
    twin = make(positions=224, pages=29, dropped=(dropped,))
    if dropped:
        with pytest.raises(AssertionError):
            check_story(twin, VOCAB, **CHUNKED)
    else:
        check_story(twin, VOCAB, **CHUNKED)
        assert "chunk_attention.k" in twin.ops.arena.held


def test_short_buckets_and_invariant_ones_expand_nothing(make, expanding):
    for twin, options in ((make(), {}), (make(positions=224, pages=29, invariant=True), CHUNKED)):
        check_story(twin, VOCAB, **options)
        assert "chunk_attention.k" not in twin.ops.arena.held


@pytest.mark.parametrize("name", sorted(set(OPS) - {"split_chunks", "chunk_attention"}))
def test_mutation_an_op_left_out_once_shows(make, name):
    """Every op of the vocabulary takes part, and matters."""
    twin = make(dropped=(name,))
    with pytest.raises(AssertionError):
        check_story(twin, VOCAB)


def test_experts_as_good_as_each_other_are_the_devices_choice(make):
    """A device that favours half of the experts by less than the tie chooses otherwise, is followed, and agrees; a smaller tie shows it.
    Wide enough for two such rows, by 0.0105 each, where a processor's rounding moves a score by 0.0024."""
    twin, strict = make(tie=0.03), make(tie=0.03)
    for device in (twin, strict):
        for expert in range(0, SIZES["n_routed_experts"], 2):
            device.favour(expert, 0.02)
    check_story(twin, VOCAB)
    found = max(twin.oracle.followed, key=lambda one: one.gap)
    strict.oracle.tie = found.gap
    with pytest.raises(AssertionError, match=rf"layer {found.layer}, row {found.row}: .* a gap of {found.gap:.4f}"):
        check_story(strict, VOCAB)


def test_mutation_a_worse_expert_shows(make):
    twin = make()
    twin.favour(0, 0.05)
    with pytest.raises(AssertionError, match=r"layer 0, row \d+: .* a gap of 0\.0[0-4]"):
        check_story(twin, VOCAB)


def test_what_dead_rows_hold_changes_nothing(make):
    """The same launches over buffers of NaN, of zeros and of large numbers: the same bits."""
    twin = make()
    names = []
    for name, _, got in story(twin, VOCAB):
        if name == "moved":  # a move is no launch to repeat
            continue
        names.append(name)
        for value in (0x00, 0x7E):
            poison(twin.ops, ("taps",), value)
            for one in twin.launches:
                one.run.run(0)
            check_bitwise(twin.ops.host(twin.logits)[: len(got)], got, name)
    assert names == ["chunk", "tree", "block"]


def rows_of(twin, pages, bucket, company):
    """Logits of a tree over a chunk of nineteen, in a bucket, alone or beside another stream's rows."""
    rng = np.random.default_rng(8)
    tokens, tree, other = rng.integers(0, VOCAB, 19), rng.integers(0, VOCAB, len(TREE)), rng.integers(0, VOCAB, 5)
    twin.run_step(make_plan([tokens], [range(-1, 18)], [0], pages[:1]), 24)
    beside = ([other], [range(-1, 4)], [0]) if company else ([], [], [])
    parts = ([*beside[0], tree], [*beside[1], TREE], [*beside[2], 19])
    order = pages[[1, 0]] if company else pages[:1]
    got, _ = twin.run_step(make_plan(*parts, order), bucket)
    return got[-len(TREE) :]


def test_an_invariant_row_has_the_same_bits_in_every_bucket(make):
    twin = make(invariant=True)
    pages = page_table(2, twin.each)
    first = rows_of(twin, pages, 6, False)
    for bucket, company in ((8, False), (24, False), (12, True), (40, True)):
        check_bitwise(rows_of(twin, pages, bucket, company), first, f"bucket {bucket}")


def test_mutation_without_invariance_bits_follow_the_bucket(make):
    twin = make()
    pages = page_table(2, twin.each)
    assert not np.array_equal(rows_of(twin, pages, 24, False), rows_of(twin, pages, 8, False))


def test_smaller_buckets_fit_the_largest_ones_memory(make):
    """After the buckets have been recorded the arena is sealed: each can be recorded again, a larger one cannot."""
    twin = make()
    pages = page_table(2, twin.each)
    buckets = (24, 12, 6)
    for bucket in buckets:
        rows_of(twin, pages, bucket, False)
    twin.ops.seal()
    held = dict(twin.ops.arena.held)
    for bucket in buckets:
        rows_of(twin, pages, bucket, False)
    assert twin.ops.arena.held == held
    with pytest.raises(RuntimeError, match=r"buffer '[xh]' of 3200 bytes, but the arena is sealed with 3072 bytes"):
        rows_of(twin, pages, 25, False)


def test_costs_are_the_vocabularys(make):
    """An op's cost stands on its first launch, with the true number of rows where one is given."""
    twin = make()
    plan = make_plan([[1, 2, 3]], [[-1, 0, 1]], [0], page_table(1, twin.each))
    twin.run_step(replace(plan, out_rows=np.array([2], np.int32)), 4)
    ops = [one.op for one in twin.launches]
    layers = 2
    assert ops.count("linear_f32") == 1 and ops.count("tree_mla") == layers + 1 and ops.count("moe_w4") == 3
    first = next(one for one in twin.launches if one.op == "rms_norm")
    assert first.cost() == OPS["rms_norm"].cost({"M": 4, "H": 64}) and first.cost({"M": 3}).flops == 4.0 * 3 * 64
    attention = [one.cost({"keys": 3.0}) for one in twin.launches if one.op == "tree_mla"]
    assert [bool(cost.flops) for cost in attention] == [True, False, True]
