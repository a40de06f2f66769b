"""Multi-head latent attention with a paged cache and a tree mask: the definition.

Keys are walked in tiles of KEY_TILE positions that begin at absolute multiples of KEY_TILE, and a
row's own path lies in them in order of position. Whether a token is a committed one or the ancestor
of a tree node, it stands in the same place of the same tile, so a row's sum has the same order in
plain decoding, in a tree and in a prefill chunk: equal bits, not just equal values.
"""

from __future__ import annotations

import numpy as np

from runtime.kernels_np.dense import normed
from runtime.kernels_np.rows import ROW_TILE, f32, product_per_head
from runtime.types import F32, I32, I64, U64, Array

# The last tile, half empty, is gathered anew for every row of a tree, so it should be small; a product of eight heads with 56 keys of
# 576 numbers is the largest that OpenBLAS leaves to one thread (2^18 multiply-adds).
KEY_TILE = 56


def rotate_pairs(x: F32, cos_sin: F32) -> F32:
    """Interleaved rotary embedding of x [..., R] by cos_sin [..., R] = R/2 cosines, then R/2 sines."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty(x.shape, np.float32)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = odd * cos + even * sin
    return out


def mla_latent(
    a: Array, q_norm: F32, kv_norm: F32, eps: float, pos: I32, slot: I32, cos_sin: F32, *, q_latent: Array, cache: Array
) -> None:
    a = f32(a)
    q_rank, latent = q_norm.shape[0], kv_norm.shape[0]
    q_latent[:] = normed(a[:, :q_rank], q_norm, eps)
    compressed = normed(a[:, q_rank : q_rank + latent], kv_norm, eps)
    key = rotate_pairs(a[:, q_rank + latent :], cos_sin[pos])
    cache[slot] = np.concatenate([compressed, key], axis=1)


def mla_query(q: Array, w_uk: F32, pos: I32, cos_sin: F32, *, out: Array) -> None:
    heads, latent, nope = w_uk.shape
    split = f32(q).reshape(q.shape[0], heads, -1)
    out[:, :, :latent] = product_per_head(split[:, :, :nope], w_uk)
    out[:, :, latent:] = rotate_pairs(split[:, :, nope:], cos_sin[pos][:, None])


def mla_value(u: Array, w_uv: F32, *, out: Array) -> None:
    out[:] = product_per_head(u, w_uv).reshape(out.shape)


def tree_mla(
    q: Array,
    cache: Array,
    pages: I32,
    page_size: int,
    ctx: I32,
    row0: I32,
    seq: I32,
    pos: I32,
    slot: I32,
    ancestors: U64,
    scale: float,
    *,
    out: Array,
) -> None:
    counts = np.bincount(seq[seq >= 0], minlength=len(ctx))
    for b in range(len(ctx)):
        rows = slice(int(row0[b]), int(row0[b]) + int(counts[b]))
        if counts[b] == 0:
            continue
        committed = slots_of(pages[b], page_size, int(ctx[b]))
        out[rows] = _attend_sequence(q[rows], cache, committed, pos[rows], slot[rows], ancestors[rows], scale, out.shape[2])


def slots_of(pages: I32, page_size: int, count: int) -> I64:
    """Cache slots of positions 0 .. count - 1 of a sequence: [count] i64."""
    position = np.arange(count)
    return pages[position // page_size].astype(np.int64) * page_size + position % page_size


def visible(bits: U64, count: int) -> Array:
    """Ancestor words [n, W] to booleans [n, count]."""
    flat = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little")
    return flat[:, :count].astype(bool)


def _tail_slots(committed: I64, first: int, tiles: int, pos: I32, slot: I32, bits: U64) -> tuple[I64, Array]:
    """Slots [n or 1, tiles * KEY_TILE] of the positions from `first` on, and which of them each row sees [n, same].

    Rows of a chain share their slots (row i lies at position ctx + i); a tree's rows have one path
    each. A position after the row's own points at the row's own slot, so no foreign memory is read.
    """
    n, ctx, width = len(pos), len(committed), tiles * KEY_TILE
    position = first + np.arange(width)
    seen = position[None, :] <= pos[:, None]
    depth = pos - ctx
    if np.array_equal(depth, np.arange(n)):
        shared = np.full((1, width), slot[-1], np.int64)
        known = np.concatenate([committed[first:], slot.astype(np.int64)])
        shared[0, : len(known)] = known
        return shared, seen
    slots = np.repeat(slot.astype(np.int64)[:, None], width, axis=1)
    slots[:, : ctx - first] = committed[first:]
    row, node = np.nonzero(visible(bits, n))
    slots[row, ctx - first + depth[node]] = slot[node]
    return slots, seen


def _attend_sequence(q: Array, cache: Array, committed: I64, pos: I32, slot: I32, bits: U64, scale: float, latent: int) -> Array:
    """Rows of one sequence: q [n, A, C] to [n, A, latent]."""
    n, heads, width = q.shape
    groups = -(-heads // ROW_TILE)
    query = np.zeros((n, groups * ROW_TILE, width), np.float32)
    query[:, :heads] = q
    query = query.reshape(n, 1, groups, ROW_TILE, width)

    lead = len(committed) // KEY_TILE
    tail = int(pos.max()) // KEY_TILE - lead + 1
    lead_keys = f32(cache.take(committed[: lead * KEY_TILE], axis=0)).reshape(1, lead, KEY_TILE, width)
    slots, seen = _tail_slots(committed, lead * KEY_TILE, tail, pos, slot, bits)
    tail_keys = f32(cache.take(slots, axis=0)).reshape(len(slots), tail, KEY_TILE, width)

    scores = np.empty((n, lead + tail, groups, ROW_TILE, KEY_TILE), np.float32)
    for part, keys in ((scores[:, :lead], lead_keys), (scores[:, lead:], tail_keys)):
        if part.shape[1]:
            np.matmul(query, keys.transpose(0, 1, 3, 2)[:, :, None], out=part)
    scores *= np.float32(scale)
    hidden = ~seen.reshape(n, tail, 1, 1, KEY_TILE)
    np.copyto(scores[:, lead:], np.float32(-np.inf), where=hidden)

    scores -= scores.max(axis=(1, 4), keepdims=True)
    weights = np.exp(scores, out=scores)
    totals = weights.sum(axis=-1, keepdims=True)
    total = np.zeros((n, groups, ROW_TILE, 1), np.float32)
    mixed = np.zeros((n, groups, ROW_TILE, latent), np.float32)
    part = np.empty_like(mixed)
    for tile in range(lead + tail):  # one after the other: the order of a row's sum is its positions' order
        keys = lead_keys[:, tile] if tile < lead else tail_keys[:, tile - lead]
        total += totals[:, tile]
        mixed += np.matmul(weights[:, tile], keys[:, None, :, :latent], out=part)
    return (mixed / total).reshape(n, -1, latent)[:, :heads]
