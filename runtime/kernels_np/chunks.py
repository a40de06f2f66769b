"""Attention of long chunks in the un-absorbed form: the definition."""

from __future__ import annotations

import numpy as np

from runtime.chunks import TILE
from runtime.kernels_np.mla import slots_of
from runtime.kernels_np.rows import f32
from runtime.types import F32, I32, Array


def split_chunks(seq: I32, pos: I32, ctx: I32, row0: I32, least: int, room: int, *, rest: Array) -> None:
    rest[:] = seq
    left = room // TILE
    for b in range(len(ctx)):
        rows = np.flatnonzero(seq == b)
        tiles = -(-(int(ctx[b]) + len(rows)) // TILE)
        chain = np.array_equal(pos[rows] - ctx[b], rows - row0[b])
        if len(rows) >= least and chain and tiles <= left:
            rest[rows] = -1
            left -= tiles


def chunk_attention(
    q: Array,
    absorbed: Array,
    cache: Array,
    w_uk: F32,
    w_uv: F32,
    pages: I32,
    page_size: int,
    ctx: I32,
    row0: I32,
    seq: I32,
    rest: I32,
    scale: float,
    value: Array,
) -> None:
    heads, latent, nope = w_uk.shape
    for b in range(len(ctx)):
        rows = np.flatnonzero((seq == b) & (rest < 0))
        if not len(rows):
            continue
        count = int(ctx[b]) + len(rows)
        keys = f32(cache[slots_of(pages[b], page_size, count)])
        # [A, keys, N] and [A, keys, U], rounded as the cache is: that is how they are stored
        k_nope, v = (f32(np.matmul(keys[:, :latent], w).astype(cache.dtype)) for w in (w_uk, w_uv.transpose(0, 2, 1)))
        q_nope = f32(q[rows]).reshape(len(rows), heads, -1)[:, :, :nope].transpose(1, 0, 2)
        q_rope = f32(absorbed[rows])[:, :, latent:].transpose(1, 0, 2)
        scores = (np.matmul(q_nope, k_nope.transpose(0, 2, 1)) + np.matmul(q_rope, keys[:, latent:].T)) * np.float32(scale)
        seen = np.arange(count) <= ctx[b] + (rows - row0[b])[:, None]
        scores = np.where(seen, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.matmul(weights, v) / weights.sum(axis=-1, keepdims=True)
        value[rows] = mixed.transpose(1, 0, 2).reshape(len(rows), -1)
