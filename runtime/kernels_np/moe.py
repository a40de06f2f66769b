"""Routing and the INT4 mixture of experts: the definitions."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from runtime.kernels_np.dense import gated
from runtime.kernels_np.rows import f32, product, product_each
from runtime.types import F32, I32, Array
from runtime.w4 import W4, dequantise

DEQUANTISED_BYTES = 1 << 30  # experts kept in float32: all 96 of the demo model take 57 MB, one of K2.6's takes 176 MB


class Experts:
    """Packed experts with a bounded memory of dequantised ones, least recently used first to go.

    The numbers are those of the packed bytes; keeping them as float32 saves decoding an expert
    (0.4 ms at the demo's size) in every step that hits it.
    """

    def __init__(self, packed: W4) -> None:
        self.packed = packed
        self.shape = (packed.E, packed.N, packed.K)
        room = max(1, min(packed.E, DEQUANTISED_BYTES // (4 * packed.N * packed.K)))
        # one array, for its huge pages; contiguous along the longer side, which a row's product reads faster
        tall = packed.N > packed.K
        values = np.empty((room, packed.K, packed.N) if tall else (room, packed.N, packed.K), np.float32)
        self._values = values.transpose(0, 2, 1) if tall else values
        self._place: OrderedDict[int, int] = OrderedDict()

    def matrix(self, expert: int) -> F32:
        """[N, K] float32 of one expert, until others have taken its place."""
        place = self._place.pop(expert, None)
        if place is None:
            full = len(self._place) == len(self._values)
            place = self._place.popitem(last=False)[1] if full else len(self._place)
            self._values[place] = dequantise(self.packed, expert)
        self._place[expert] = place
        found: F32 = self._values[place]
        return found


def route(x: Array, w: F32, bias: F32, scale: float, *, expert: I32, weight: F32) -> None:
    with np.errstate(over="ignore"):
        score = np.float32(1.0) / (np.float32(1.0) + np.exp(-product(x, w)))
    top_k = expert.shape[1]
    chosen = np.argsort(-(score + bias), axis=1, kind="stable")[:, :top_k]  # stable: ties to the lower expert
    expert[:] = chosen
    picked = np.take_along_axis(score, chosen, axis=1)
    weight[:] = picked / (picked.sum(axis=1, keepdims=True) + np.float32(1e-20)) * np.float32(scale)


def moe_w4(x: Array, expert: I32, weight: F32, w13: Experts, w2: Experts, base: Array, *, out: Array) -> int:
    """As the op; returns how many distinct experts were hit."""
    rows, top_k = expert.shape
    order = np.argsort(expert, axis=None, kind="stable")  # choices side by side by expert; order // top_k are their rows
    counts = np.bincount(expert.reshape(-1))
    hit = np.flatnonzero(counts)
    ends = np.cumsum(counts[hit])
    runs = list(zip(hit.tolist(), (ends - counts[hit]).tolist(), ends.tolist(), strict=True))
    taken = f32(x)[order // top_k]
    gate_up = np.empty((len(order), w13.shape[1]), np.float32)
    for number, begin, end in runs:
        product_each(taken[begin:end], w13.matrix(number), out=gate_up[begin:end])
    hidden = f32(gated(gate_up).astype(x.dtype))
    down = np.empty((len(order), w2.shape[1]), np.float32)
    for number, begin, end in runs:
        product_each(hidden[begin:end], w2.matrix(number), out=down[begin:end])
    by_row = np.empty_like(down)
    by_row[order] = down
    weighted = by_row.reshape(rows, top_k, -1) * weight[:, :, None]
    out[:] = weighted.sum(axis=1) + f32(base)
    return len(hit)
