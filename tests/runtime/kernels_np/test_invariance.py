"""A row's numbers do not depend on its company: equal bits at any M, offset and in any tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime.kernels_np import NumpyBackend, dense, mla
from runtime.kernels_np.moe import Experts
from runtime.kernels_np.rows import product, product_each, product_per_head
from runtime.w4 import pack
from tests.plans import ancestors_of, depth_of, page_table, random_parents

ROWS = (1, 2, 7, 8, 9, 17, 33, 100)
SHAPES = ((1536, 192), (512, 1024), (768, 512), (4096, 512), (256, 512), (512, 128), (32, 512), (64, 128), (7, 33))


def one_by_one(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), len(w)), np.float32)
    product_each(x, w, out=out)
    return out


@pytest.mark.parametrize("product", [product, one_by_one])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int], product: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape, np.float32)
    row = rng.standard_normal((1, shape[1]), np.float32)
    alone = product(row, w)[0]
    for m in ROWS:
        for at in {0, m // 2, m - 1}:
            x = rng.standard_normal((m, shape[1]), np.float32)
            x[at] = row
            found = product(x, w)
            assert np.array_equal(found[at], alone), f"row {at} of {m}"
            assert np.allclose(found, x.astype(np.float64) @ w.T.astype(np.float64), atol=2e-3)


def test_mutation_plain_matmul_depends_on_company() -> None:
    """Without fixed shapes the last bits do change; otherwise the test above could not fail."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((1536, 512), np.float32), rng.standard_normal((33, 512), np.float32)
    assert not np.array_equal((x @ w.T)[:1], x[:1] @ w.T)


def test_product_per_head() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((8, 512, 128), np.float32)
    row = rng.standard_normal((8, 128), np.float32)
    alone = product_per_head(row[None], w)[0]
    for m in ROWS[:6]:
        x = rng.standard_normal((m, 8, 128), np.float32)
        x[m // 2] = row
        found = product_per_head(x, w)
        assert np.array_equal(found[m // 2], alone)
        assert np.allclose(found, np.einsum("mak,ank->man", x, w), atol=1e-3)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_norm_route_and_experts(storage: str) -> None:
    rng = np.random.default_rng(2)
    ops = NumpyBackend(storage)
    hidden, experts, width, top_k = 128, 8, 64, 3
    packed = [
        Experts(pack(rng.integers(1, 16, s).astype(np.uint8), rng.uniform(0.01, 0.02, (*s[:2], s[2] // 32)).astype("bfloat16")))
        for s in ((experts, 2 * width, hidden), (experts, hidden, width))
    ]
    norm, router, bias = (
        rng.standard_normal(hidden, np.float32),
        rng.standard_normal((experts, hidden), np.float32),
        np.zeros(experts, np.float32),
    )
    x = ops.param(rng.standard_normal((40, hidden), np.float32)).astype(ops.zeros((1,)).dtype)

    def run(rows: np.ndarray) -> np.ndarray:
        m = len(rows)
        h, out = ops.zeros((m, hidden)), ops.zeros((m, hidden))
        expert, weight = np.empty((m, top_k), np.int32), np.empty((m, top_k), np.float32)
        ops.rms_norm(rows, norm, 1e-5, out=h)
        ops.route(h, router, bias, 2.5, expert=expert, weight=weight)
        ops.moe_w4(h, expert, weight, *packed, rows, out=out)
        return np.concatenate([out.astype(np.float32), expert, weight], axis=1)

    together = run(x)
    for at in (0, 5, 39):
        assert np.array_equal(run(x[at : at + 1])[0], together[at])
    assert np.array_equal(run(x[3:20]), together[3:20])


@pytest.mark.parametrize("heads", [2, 8, 12])
@pytest.mark.parametrize("ctx", [0, 5, 55, 56, 130])
def test_tree_row_equals_plain_decoding(heads: int, ctx: int) -> None:
    """Each node of a tree gets the bits that its path gets when decoded token by token."""
    rng = np.random.default_rng(ctx + heads)
    latent, rope, nodes, page = 64, 16, 21, 16
    width = latent + rope
    parent = random_parents(rng, nodes)
    pages = page_table(1, 12, rng)
    cache = rng.standard_normal((13 * page, width)).astype(np.float32)
    cache[:page] = np.nan  # the null page
    slot_of = lambda p: pages[0][p // page] * page + p % page  # noqa: E731
    q = rng.standard_normal((nodes, heads, width)).astype(np.float32)
    keys = rng.standard_normal((nodes, width)).astype(np.float32)
    slots = np.array([slot_of(ctx + i) for i in range(nodes)], np.int32)
    cache[slots] = keys
    depth = depth_of(parent)

    def attend(rows: np.ndarray, memory: np.ndarray, start: int, pos: np.ndarray, slot: np.ndarray, bits: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), heads, latent), np.float32)
        one = np.array([start], np.int32)
        mla.tree_mla(
            rows,
            memory,
            pages,
            page,
            one,
            np.zeros(1, np.int32),
            np.zeros(len(rows), np.int32),
            pos.astype(np.int32),
            slot,
            bits,
            0.2,
            out=out,
        )
        return out

    tree = attend(q, cache, ctx, ctx + depth, slots, ancestors_of(parent))
    for node in range(nodes):
        path, i = [], node
        while i >= 0:
            path.append(i)
            i = parent[i]
        path.reverse()
        memory = cache.copy()
        for j, p in enumerate(path):
            memory[slot_of(ctx + j)] = keys[p]
        own = np.array([slot_of(ctx + len(path) - 1)], np.int32)
        plain = attend(q[node : node + 1], memory, ctx + len(path) - 1, np.array([ctx + len(path) - 1]), own, np.ones((1, 1), np.uint64))
        assert np.array_equal(tree[node], plain[0]), f"node {node} at depth {depth[node]}"


def test_add_rms_norm_is_add_then_norm() -> None:
    rng = np.random.default_rng(4)
    x, delta = (rng.standard_normal((5, 64)).astype(np.float32) for _ in range(2))
    w, out, want = rng.standard_normal(64).astype(np.float32), np.empty((5, 64), np.float32), np.empty((5, 64), np.float32)
    total = x + delta
    dense.add_rms_norm(x, delta, w, 1e-5, out=out)
    dense.rms_norm(total, w, 1e-5, out=want)
    assert np.array_equal(x, total) and np.array_equal(out, want)
