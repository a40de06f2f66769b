"""Products whose rows do not depend on their company.

BLAS picks its kernel, hence its order of summation, by the shape of a call: row 0 of a 1-row and of
a 9-row product differ in their last bits. Every product here is therefore made of calls of one
fixed shape, ROW_TILE rows at a time, the last tile filled with zeros. A row's result is then the
same bits in any bucket, at any offset, beside any neighbours, which is what makes speculative text
equal plain text exactly. The price: one row costs as much as eight (measured 95 us against 19 us
for [1, 512] x [512, 1536] on two Zen 5 cores), and a root with seven nodes costs what one token does.
"""

from __future__ import annotations

import numpy as np

from runtime.types import F32, Array

ROW_TILE = 8


def f32(x: Array) -> F32:
    """Any stored array as float32: itself, or its bfloat16 values widened."""
    return np.asarray(x, np.float32)


def tiled(x: F32) -> F32:
    """[M, K] to [tiles, ROW_TILE, K], zero rows at the end."""
    rows, width = x.shape
    tiles = -(-rows // ROW_TILE)
    if tiles * ROW_TILE == rows:
        return np.ascontiguousarray(x).reshape(tiles, ROW_TILE, width)
    padded = np.zeros((tiles * ROW_TILE, width), np.float32)
    padded[:rows] = x
    return padded.reshape(tiles, ROW_TILE, width)


def product(x: Array, w: F32) -> F32:
    """x w^T for x [M, K] and w [N, K], in float32, each row independent of the others.

    The weight stands on the left ([N, K] x [K, 8]): the few rows are then the narrow side of the
    product, 95 us where x w^T takes 114 at N = 1536, K = 512.
    """
    rows = x.shape[0]
    out = np.matmul(w, tiled(f32(x)).transpose(0, 2, 1))  # [tiles, N, ROW_TILE]
    by_row: F32 = out.transpose(0, 2, 1).reshape(-1, w.shape[0])
    return by_row[:rows]


def product_each(x: F32, w: F32, *, out: F32) -> None:
    """x w^T as `product`, one row after the other: where rows are few and matrices small, as they are for an expert.

    A row of a [256, 512] matrix costs 5 to 7 us, a tile of eight rows 17 (two cores) or 28 (one): below five rows an
    expert, which is where decoding lies, this is the cheaper way to be independent of company.
    """
    np.matmul(w, x[:, :, None], out=out[:, :, None])


def product_per_head(x: Array, w: F32) -> F32:
    """x[:, a] w[a]^T for x [M, A, K] and w [A, N, K]: [M, A, N] in float32, rows independent."""
    rows, heads, width = x.shape
    tiles = tiled(f32(x).reshape(rows, heads * width)).reshape(-1, ROW_TILE, heads, width)
    out = np.matmul(w[None], tiles.transpose(0, 2, 3, 1))  # [tiles, A, N, ROW_TILE]
    by_row: F32 = out.transpose(0, 3, 1, 2).reshape(-1, heads, w.shape[1])
    return by_row[:rows]
