"""The drafter's own ops: head norm with rotation of halves, context writes, block attention, top-K."""

from __future__ import annotations

import numpy as np

from runtime.kernels_np.dense import normed
from runtime.kernels_np.mla import slots_of
from runtime.kernels_np.rows import f32
from runtime.sampling import top_logprobs as ranked
from runtime.types import F32, I32, Array


def rotate_halves(x: F32, cos_sin: F32) -> F32:
    """Rotary embedding of pairs (j, j + J/2) of x [..., J] by cos_sin [..., J] = cosines, then sines."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def head_norm_rope(x: Array, w: F32, eps: float, pos: I32, cos_sin: F32, *, out: Array) -> None:
    out[:] = rotate_halves(normed(x.reshape(out.shape), w, eps), cos_sin[pos][:, None])


def kv_write(k: Array, v: Array, slot: I32, *, k_cache: Array, v_cache: Array) -> None:
    k_cache[slot] = k
    v_cache[slot] = v.reshape(k.shape)


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    pages: I32,
    page_size: int,
    ctx: I32,
    scale: float,
    *,
    out: Array,
) -> None:
    """Drafts need no equal bits, only the right numbers: a draft never changes the text."""
    streams = len(ctx)
    block, heads, width = q.shape[0] // streams, q.shape[1], q.shape[2]
    groups = k.shape[1]
    query = f32(q).reshape(streams, block, groups, heads // groups, width)
    own_k, own_v = (f32(a).reshape(streams, block, groups, width) for a in (k, v))
    result = out.reshape(streams, block, groups, heads // groups, width)
    for b in range(streams):
        slots = slots_of(pages[b], page_size, int(ctx[b]))
        keys = np.concatenate([f32(k_cache.take(slots, axis=0)), own_k[b]]).transpose(1, 2, 0)  # [Z, J, X]
        values = np.concatenate([f32(v_cache.take(slots, axis=0)), own_v[b]]).transpose(1, 0, 2)  # [Z, X, J]
        rows = query[b].transpose(1, 0, 2, 3).reshape(groups, -1, width)
        scores = np.matmul(rows, keys) * np.float32(scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.matmul(weights, values) / weights.sum(axis=-1, keepdims=True)
        result[b] = mixed.reshape(groups, block, heads // groups, width).transpose(1, 0, 2, 3)


def top_logprobs(logits: F32, *, ids: I32, logp: F32) -> None:
    ids[:], logp[:] = ranked(logits, ids.shape[1])
