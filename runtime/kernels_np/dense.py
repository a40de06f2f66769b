"""Embedding, norms, linear layers, gates and row copies: the definitions."""

from __future__ import annotations

import numpy as np

from runtime.kernels_np.rows import f32, product
from runtime.types import F32, I32, Array


def embed(token: I32, table: F32, first: int, *, out: Array) -> None:
    local = token - first
    here = (local >= 0) & (local < table.shape[0])
    out[:] = np.where(here[:, None], table[np.where(here, local, 0)], np.float32(0.0))


def normed(x: Array, w: F32, eps: float) -> Array:
    """x * rsqrt(mean(x^2) + eps) * w along the last axis, in float32, not rounded."""
    x = f32(x)
    mean = np.add.reduce(np.square(x), axis=-1, keepdims=True) / np.float32(x.shape[-1])
    result: Array = x * (np.float32(1.0) / np.sqrt(mean + np.float32(eps)))
    result *= w
    return result


def rms_norm(x: Array, w: F32, eps: float, *, out: Array) -> None:
    out[:] = normed(x, w, eps)


def add_rms_norm(x: Array, delta: Array, w: F32, eps: float, *, out: Array) -> None:
    x[:] = f32(x) + f32(delta)
    out[:] = normed(x, w, eps)


def linear(x: Array, w: F32, *, out: Array) -> None:
    out[:] = product(x, w)


def linear_f32(x: Array, w: F32, *, out: F32) -> None:
    out[:] = product(x, w)


def silu(x: F32) -> Array:
    """x * sigmoid(x); exp may overflow to inf for very negative x, whose silu is then -0."""
    with np.errstate(over="ignore"):
        return x / (np.float32(1.0) + np.exp(-x))


def silu_mul(x: Array, *, out: Array) -> None:
    out[:] = gated(f32(x))


def gated(x: F32) -> Array:
    """silu(x[:, :F]) * x[:, F:] of [M, 2*F], in float32, not rounded."""
    half = x.shape[-1] // 2
    return silu(np.ascontiguousarray(x[:, :half])) * x[:, half:]


def copy(x: Array, *, out: Array) -> None:
    out[:] = x


def gather_rows(x: Array, rows: I32, *, out: Array) -> None:
    out[:] = x[rows]


def kv_move(cache: Array, moves: I32) -> None:
    if len(moves):
        cache[:, moves[:, 1]] = cache[:, moves[:, 0]]  # the right side is a copy: all reads first
