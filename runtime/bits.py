"""Ancestor bits: which rows of its own tree a row sees, as the plan states them in 64-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.types import U64, Array


def ancestor_bits(parent: Array, words: int) -> U64:
    """Returns the visibility rows of one tree: [T, words] u64, bit j of row i set iff j is i or an ancestor of i.

    parent: [T] int, parent[0] = -1 and parent[t] < t. Raises ValueError on another parent or if
    T nodes need more than 64 * words bits. Cost: O(T words log depth), by doubling the jump.
    """
    return forest_bits([parent], words)


def forest_bits(parents: Sequence[Array], words: int) -> U64:
    """Returns `ancestor_bits` of several trees, one below the other: [sum of T, words] u64, in one pass."""
    sizes = np.array([len(p) for p in parents], np.int64)
    total, largest = int(sizes.sum()), int(sizes.max(initial=0))
    if largest > 64 * words:
        raise ValueError(f"ancestor bits: a tree of {largest} nodes needs {-(-largest // 64)} words of 64 bits, the plan has {words}")
    bits = np.zeros((total + 1, words), np.uint64)  # the last row is the one above every root: it sees nothing
    if total == 0:
        return bits[:0]
    first = np.cumsum(sizes) - sizes
    first_of = np.repeat(first, sizes)
    parent = np.concatenate(parents).astype(np.int64)
    row = np.arange(total)
    node = row - first_of
    bad = np.flatnonzero((parent >= node) | (parent < -1) | ((parent < 0) != (node == 0)))
    if len(bad):
        raise ValueError(f"ancestor bits: node {node[bad[0]]} has parent {parent[bad[0]]}; a root has -1, any other node a smaller one")
    bits[row, node >> 6] = np.left_shift(np.uint64(1), (node & 63).astype(np.uint64))
    jump = np.append(np.where(parent < 0, total, parent + first_of), total)
    while (jump != total).any():  # after k rounds a row holds its 2^k nearest ancestors and jumps past them
        bits |= bits[jump]
        jump = jump[jump]
    return bits[:total]


def chain_bits(n: int, words: int) -> U64:
    """Returns the visibility rows of n tokens in a row, a prefill chunk: [n, words] u64, lower triangular."""
    if n > 64 * words:
        raise ValueError(f"chain bits: {n} rows need {-(-n // 64)} words of 64 bits, the plan has {words}")
    seen = np.arange(1, n + 1)[:, None] - 64 * np.arange(words)[None, :]  # bits set in each word, unclipped
    low = np.left_shift(np.uint64(1), np.clip(seen, 0, 63).astype(np.uint64)) - np.uint64(1)
    return np.where(seen >= 64, ~np.uint64(0), low)
