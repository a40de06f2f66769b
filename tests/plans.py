"""Step plans and small worlds for tests: one sequence or many, chains or trees, over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runtime.types import StepPlan

PAGE = 16


def ancestors_of(parent: Sequence[int]) -> np.ndarray:
    """[T, W] u64 by walking each node to the root: slow and plain."""
    words = -(-len(parent) // 64)
    bits = np.zeros((len(parent), words), np.uint64)
    for i in range(len(parent)):
        node = i
        while node >= 0:
            bits[i, node // 64] |= np.uint64(1) << np.uint64(node % 64)
            node = parent[node]
    return bits


def depth_of(parent: Sequence[int]) -> np.ndarray:
    depth: list[int] = []
    for p in parent:
        depth.append(0 if p < 0 else depth[p] + 1)
    return np.array(depth, np.int32)


def page_table(sequences: int, pages: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """[B, P] page numbers from 1 on, shuffled if a generator is given: pages need not be in order."""
    numbers = np.arange(1, sequences * pages + 1, dtype=np.int32)
    if rng is not None:
        rng.shuffle(numbers)
    return numbers.reshape(sequences, pages)


def make_plan(
    tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], ctx: Sequence[int], pages: np.ndarray, page: int = PAGE
) -> StepPlan:
    """A greedy plan: for each sequence its rows' tokens and parents (-1: the root), after ctx committed tokens."""
    rows = [len(t) for t in tokens]
    row0 = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(np.int32)
    words = max(-(-n // 64) for n in rows)
    bits = np.zeros((sum(rows), words), np.uint64)
    pos, slot, seq = [], [], []
    for b, parent in enumerate(parents):
        own = ancestors_of(parent)
        bits[row0[b] : row0[b] + rows[b], : own.shape[1]] = own
        place = ctx[b] + np.arange(rows[b])
        pos.append(ctx[b] + depth_of(parent))
        slot.append(pages[b][place // page] * page + place % page)
        seq.append(np.full(rows[b], b))
    streams = len(tokens)
    i32 = lambda parts: np.concatenate(parts).astype(np.int32)  # noqa: E731
    zero = np.zeros(streams, np.float32)
    return StepPlan(
        bucket=sum(rows),
        token=i32([np.asarray(t) for t in tokens]),
        pos=i32(pos),
        slot=i32(slot),
        seq=i32(seq),
        ancestors=bits,
        ctx=np.asarray(ctx, np.int32),
        row0=row0,
        pages=pages.astype(np.int32),
        moves=np.zeros((0, 2), np.int32),
        out_rows=np.arange(sum(rows), dtype=np.int32),
        seed=np.zeros(streams, np.uint64),
        temperature=zero,
        top_p=zero + 1,
        min_p=zero,
        top_k=np.zeros(streams, np.int32),
        logprobs=np.full(streams, -1, np.int32),
        adjust_seq=np.zeros((0, 2), np.int32),
        adjust_seq_by=np.zeros((0, 2), np.float32),
        adjust_row=np.zeros((0, 2), np.int32),
        adjust_row_by=np.zeros((0, 2), np.float32),
        mask_rows=np.zeros(0, np.int32),
        masks=np.zeros((0, 0), np.uint32),
    )


def chain_plan(tokens: Sequence[int], ctx: int, pages: np.ndarray, page: int = PAGE, out_rows: Sequence[int] | None = None) -> StepPlan:
    """One sequence, rows in a chain: a prefill chunk or a single token."""
    plan = make_plan([tokens], [list(range(-1, len(tokens) - 1))], [ctx], pages, page)
    return plan if out_rows is None else replace(plan, out_rows=np.asarray(out_rows, np.int32))


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    """A random tree of `nodes` nodes, node 0 its root."""
    return [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]
