"""The definitions against other formulations of the same mathematics, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_np import NumpyBackend, arena, dense, draft, mla, moe
from runtime.ops import OPS
from runtime.w4 import W4, dequantise, pack
from tests.plans import make_plan, page_table, random_parents


def explicit_attention(
    q: np.ndarray, c: np.ndarray, k_pe: np.ndarray, w_uk: np.ndarray, w_uv: np.ndarray, mask: np.ndarray, scale: float
) -> np.ndarray:
    """MLA without absorption: keys [k_nope | k_pe] and values are built for every head. q [M, A, N+R], mask [M, keys]."""
    nope = w_uk.shape[2]
    k_nope = np.einsum("aln,sl->san", w_uk, c)
    keys = np.concatenate([k_nope, np.repeat(k_pe[:, None], q.shape[1], 1)], -1)
    assert keys.shape[-1] == nope + k_pe.shape[-1]
    values = np.einsum("aul,sl->sau", w_uv, c)
    scores = np.einsum("mad,sad->mas", q, keys) * scale
    scores = np.where(mask[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("mas,sau->mau", p / p.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("drop", [False, True])
def test_a_chunk_is_the_same_in_either_form(drop: bool) -> None:
    """Un-absorbed equals absorbed in float32; without its last key the last row differs."""
    rng = np.random.default_rng(4)
    heads, nope, rope, latent, value, ctx, rows, page = 2, 8, 4, 16, 6, 21, 11, 16
    pages = page_table(1, 3, rng)
    plan = make_plan([[0] * rows], [list(range(-1, rows - 1))], [ctx], pages, page)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, cache, w_uk, w_uv = make(rows, heads * (nope + rope)), make(64, latent + rope), make(heads, latent, nope), make(heads, value, latent)
    absorbed, mixed = np.zeros((rows, heads, latent + rope), np.float32), np.zeros((rows, heads, latent), np.float32)
    want, got = np.zeros((2, rows, heads * value), np.float32)
    ops, cos_sin = NumpyBackend(), make(64, rope)
    ops.mla_query(q, w_uk, plan.pos, cos_sin, out=absorbed)
    where = (pages, page, plan.ctx, plan.row0, plan.seq)
    ops.tree_mla(absorbed, cache, *where, plan.pos, plan.slot, plan.ancestors, 0.3, out=mixed)
    ops.mla_value(mixed, w_uv, out=want)
    rest = np.zeros(rows, np.int32)
    ops.split_chunks(plan.seq, plan.pos, plan.ctx, plan.row0, rows, 128, rest=rest)
    assert (rest == -1).all()
    if drop:
        cache[plan.slot[-1]] = 0
    ops.chunk_attention(q, absorbed, cache, w_uk, w_uv, *where, rest, 0.3, got)
    error = np.abs(got - want).max(1)
    assert error[:-1].max() < 1e-4 and (error[-1] > 1e-2) == drop


def attention_world(seed: int, ctx: int, nodes: int, drop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Absorbed and explicit attention of a random tree after ctx tokens; drop removes one ancestor bit of the last row."""
    rng = np.random.default_rng(seed)
    heads, nope, rope, value, latent, page = 4, 16, 8, 12, 32, 16
    parent = random_parents(rng, nodes)
    pages = page_table(1, 12, rng)
    plan = make_plan([list(range(nodes))], [parent], [ctx], pages, page)
    c, k_pe = rng.standard_normal((ctx + nodes, latent)), rng.standard_normal((ctx + nodes, rope))
    cache = np.full((13 * page, latent + rope), np.nan, np.float32)
    place = np.arange(ctx + nodes)
    cache[pages[0][place // page] * page + place % page] = np.concatenate([c, k_pe], 1)
    w_uk, w_uv = rng.standard_normal((heads, latent, nope)) / 4, rng.standard_normal((heads, value, latent)) / 6
    q = rng.standard_normal((nodes, heads, nope + rope)) * 2  # spread the scores, or a flat softmax would hide everything
    absorbed = np.concatenate([np.einsum("man,aln->mal", q[..., :nope], w_uk), q[..., nope:]], -1).astype(np.float32)
    bits = plan.ancestors.copy()
    if drop is not None:
        bits[-1] &= ~(np.uint64(1) << np.uint64(drop))
    mixed = np.empty((nodes, heads, latent), np.float32)
    mla.tree_mla(absorbed, cache, pages, page, plan.ctx, plan.row0, plan.seq, plan.pos, plan.slot, bits, 0.25, out=mixed)
    out = np.empty((nodes, heads * value), np.float32)
    mla.mla_value(mixed, w_uv.astype(np.float32), out=out)
    mask = np.concatenate([np.ones((nodes, ctx), bool), mla.visible(plan.ancestors, nodes)], 1)
    return out.reshape(nodes, heads, value), explicit_attention(q, c, k_pe, w_uk, w_uv, mask, 0.25)


@pytest.mark.parametrize(("ctx", "nodes"), [(0, 1), (0, 9), (64, 1), (70, 9), (127, 33), (20, 70)])
def test_tree_attention_equals_explicit_keys_and_values(ctx: int, nodes: int) -> None:
    got, want = attention_world(ctx + nodes, ctx, nodes)
    assert np.abs(got - want).max() < 1e-3


def test_mutation_dropped_ancestor() -> None:
    got, want = attention_world(3, 40, 9, drop=0)
    assert np.abs(got - want)[:-1].max() < 1e-3 < 1e-2 < np.abs(got - want)[-1].max()


def test_batch_of_sequences_equals_each_alone() -> None:
    rng = np.random.default_rng(5)
    page, width, heads, latent = 16, 40, 4, 32
    pages = page_table(3, 6, rng)
    cache = rng.standard_normal((19 * page, width)).astype(np.float32)
    parents, ctx = [random_parents(rng, n) for n in (5, 1, 8)], [40, 3, 64]
    plan = make_plan([[0] * len(p) for p in parents], parents, ctx, pages, page)
    q = rng.standard_normal((14, heads, width)).astype(np.float32)
    together = np.empty((14, heads, latent), np.float32)
    mla.tree_mla(q, cache, pages, page, plan.ctx, plan.row0, plan.seq, plan.pos, plan.slot, plan.ancestors, 0.2, out=together)
    for b, parent in enumerate(parents):
        one = make_plan([[0] * len(parent)], [parent], [ctx[b]], pages[b : b + 1], page)
        rows = slice(plan.row0[b], plan.row0[b] + len(parent))
        alone = np.empty((len(parent), heads, latent), np.float32)
        mla.tree_mla(q[rows], cache, pages[b : b + 1], page, one.ctx, one.row0, one.seq, one.pos, one.slot, one.ancestors, 0.2, out=alone)
        assert np.array_equal(together[rows], alone)


def test_rope_turns_pairs_by_relative_position() -> None:
    """A score depends on the distance alone; interleaved pairs against complex numbers."""
    rng = np.random.default_rng(6)
    angle = np.arange(50)[:, None] * (10.0 ** (-np.arange(4) / 4))[None]
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    x = rng.standard_normal((50, 8)).astype(np.float32)
    got = mla.rotate_pairs(x, table)
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    assert np.allclose(got[:, 0::2], turned.real, atol=1e-5) and np.allclose(got[:, 1::2], turned.imag, atol=1e-5)
    halves = draft.rotate_halves(x, table)
    turned = (x[:, :4] + 1j * x[:, 4:]) * np.exp(1j * angle)
    assert np.allclose(halves, np.concatenate([turned.real, turned.imag], 1), atol=1e-5)


def test_route_selects_with_bias_and_weighs_without() -> None:
    w = np.eye(4, dtype=np.float32)
    x = np.array([[0.1, 0.2, 0.3, 0.0], [1.0, 1.0, 1.0, 1.0]], np.float32)
    bias = np.array([-10, 0, 0, 10], np.float32)
    expert, weight = np.empty((2, 2), np.int32), np.empty((2, 2), np.float32)
    moe.route(x, w, bias, 2.0, expert=expert, weight=weight)
    assert expert.tolist() == [[3, 2], [3, 1]]  # the second row ties: the lower expert
    score = 1 / (1 + np.exp(-x.astype(np.float64)))
    want = np.take_along_axis(score, expert, 1)
    assert np.allclose(weight, want / want.sum(1, keepdims=True) * 2.0, atol=1e-6)
    unbiased = np.empty((2, 2), np.int32)
    moe.route(x, w, np.zeros(4, np.float32), 2.0, expert=unbiased, weight=weight)
    assert unbiased.tolist() != expert.tolist()


def moe_world(scale_by: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The op, and a dense sum over all experts in float64."""
    rng = np.random.default_rng(7)
    rows, hidden, experts, width, top_k = 11, 64, 6, 64, 3
    codes = [rng.integers(0, 16, s).astype(np.uint8) for s in ((experts, 2 * width, hidden), (experts, hidden, width))]
    scales = [rng.uniform(0.02, 0.05, (*c.shape[:2], c.shape[2] // 32)).astype("bfloat16") for c in codes]
    packed = [pack(c, s) for c, s in zip(codes, scales, strict=True)]
    x, base = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
    expert = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int32)
    weight = rng.random((rows, top_k)).astype(np.float32)
    out = np.empty((rows, hidden), np.float32)
    moe.moe_w4(x, expert, weight, *(moe.Experts(p) for p in packed), base, out=out)
    want = base.astype(np.float64)
    w13, w2 = (
        (c.astype(np.float64) - 8) * np.repeat(s.astype(np.float64), 32, axis=2) * scale_by for c, s in zip(codes, scales, strict=True)
    )
    for e in range(experts):
        assert np.array_equal(dequantise(packed[0], e), w13[e].astype(np.float32)) or scale_by != 1.0
        gate, up = np.split(x @ w13[e].T, 2, axis=1)
        share = np.where(expert == e, weight, 0).sum(1, keepdims=True)
        want = want + share * ((gate / (1 + np.exp(-gate)) * up) @ w2[e].T)
    return out, want


def test_experts_equal_dense_sum() -> None:
    out, want = moe_world()
    assert np.allclose(out, want, atol=1e-3, rtol=1e-4)


def test_mutation_scale_off_by_one_percent() -> None:
    out, want = moe_world(1.01)
    assert not np.allclose(out, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [(5, 64, 128), (5, 128, 64)], ids=["wide", "tall"])
def test_room_for_two_experts_serves_all(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago makes room; what comes back is decoded again."""
    rng = np.random.default_rng(9)
    packed = pack(rng.integers(0, 16, shape).astype(np.uint8), rng.uniform(0.02, 0.05, (*shape[:2], shape[2] // 32)).astype("bfloat16"))
    monkeypatch.setattr(moe, "DEQUANTISED_BYTES", 2 * 4 * shape[1] * shape[2] + 1)
    decoded: list[int] = []

    def noting(w: W4, expert: int) -> np.ndarray:
        decoded.append(expert)
        return dequantise(w, expert)

    monkeypatch.setattr(moe, "dequantise", noting)
    experts = moe.Experts(packed)
    for expert in (3, 1, 3, 4, 3, 1, 0, 0):
        assert np.array_equal(experts.matrix(expert), dequantise(packed, expert))
    assert decoded == [3, 1, 4, 1, 0]


def test_weights_keep_apart_in_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any shape, larger than a block too: each holds its own numbers after all have come."""
    monkeypatch.setattr(arena, "BLOCK_BYTES", 1024)
    ops, rng = NumpyBackend(), np.random.default_rng(10)
    given = [rng.standard_normal(shape).astype("float32") for shape in ((3, 7), (5,), (0, 4), (20, 20), (2, 3, 4), (13, 17))]
    held = [ops.param(weight) for weight in given]
    assert all(np.array_equal(a, b) and a.flags.c_contiguous for a, b in zip(held, given, strict=True))


def test_block_attention_equals_a_loop() -> None:
    rng = np.random.default_rng(8)
    streams, block, heads, groups, width, page = 2, 4, 4, 2, 8, 16
    pages, ctx = page_table(streams, 3, rng), np.array([0, 21], np.int32)
    k_cache, v_cache = (rng.standard_normal((7 * page, groups, width)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((streams * block, heads, width)).astype(np.float32)
    k = rng.standard_normal((streams * block, groups, width)).astype(np.float32)
    v = rng.standard_normal((streams * block, groups * width)).astype(np.float32)
    out = np.empty((streams * block, heads * width), np.float32)
    draft.block_attention(q, k, v, k_cache, v_cache, pages, page, ctx, 0.3, out=out)
    for row in range(streams * block):
        b = row // block
        slots = [pages[b][p // page] * page + p % page for p in range(ctx[b])]
        own = slice(b * block, (b + 1) * block)
        for a in range(heads):
            g = a // (heads // groups)
            keys = np.concatenate([k_cache[slots, g], k[own, g]]).astype(np.float64)
            values = np.concatenate([v_cache[slots, g], v[own].reshape(block, groups, width)[:, g]]).astype(np.float64)
            p = np.exp(keys @ q[row, a] * 0.3)
            assert np.allclose(out[row, a * width : (a + 1) * width], (p / p.sum()) @ values, atol=1e-4)


def test_embedding_rows_of_other_ranks_are_zero() -> None:
    table, out = np.arange(12, dtype=np.float32).reshape(4, 3), np.full((3, 3), np.nan, np.float32)
    dense.embed(np.array([4, 7, 2], np.int32), table, 4, out=out)
    assert out.tolist() == [[0, 1, 2], [9, 10, 11], [0, 0, 0]]


def test_moves_read_before_they_write() -> None:
    cache = np.arange(10, dtype=np.float32).reshape(1, 10, 1)
    dense.kv_move(cache, np.array([[3, 1], [5, 2], [2, 7]], np.int32))
    assert cache[0, :, 0].tolist() == [0, 3, 5, 3, 4, 5, 6, 2, 8, 9]


def test_silu_of_large_negatives_is_zero_not_nan() -> None:
    assert dense.silu(np.array([-200.0, 0.0, 200.0], np.float32)).tolist() == [-0.0, 0.0, 200.0]


def test_every_op_is_implemented() -> None:
    assert {name for name in OPS if callable(getattr(NumpyBackend, name, None))} == set(OPS)
