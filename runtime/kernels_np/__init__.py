"""The NumPy reading of the vocabulary: the definition of every op, the oracle, the default without a GPU.

Every op computes in float32 and rounds once, when its result is stored. What "bf16" arrays are stored as
is the backend's choice: `bfloat16` is what a GPU does and what kernels are compared with; `float32`
rounds nothing and equals the reference implementation to 2e-4 (a rounded router input chooses other
experts at 1 % of the demo's positions), so it is what a machine without a GPU serves.
Weights keep their bf16 values in float32, INT4 experts stay packed.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from runtime.chunks import ChunkShape
from runtime.kernels_np import chunks, dense, draft, mla, moe, sample
from runtime.kernels_np.arena import Arena
from runtime.source import Source, W4Source
from runtime.types import F32, I32, Array
from runtime.w4 import W4

_FIXED = {"f32": np.float32, "i32": np.int32, "bool": np.bool_}
ACTIVATIONS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class NumpyBackend:
    """Ops as methods, and the three ways to come by memory: parameters, caches, named buffers."""

    name = "numpy"

    embed = staticmethod(dense.embed)
    rms_norm = staticmethod(dense.rms_norm)
    add_rms_norm = staticmethod(dense.add_rms_norm)
    linear = staticmethod(dense.linear)
    linear_f32 = staticmethod(dense.linear_f32)
    silu_mul = staticmethod(dense.silu_mul)
    copy = staticmethod(dense.copy)
    gather_rows = staticmethod(dense.gather_rows)
    kv_move = staticmethod(dense.kv_move)
    mla_latent = staticmethod(mla.mla_latent)
    mla_query = staticmethod(mla.mla_query)
    tree_mla = staticmethod(mla.tree_mla)
    mla_value = staticmethod(mla.mla_value)
    split_chunks = staticmethod(chunks.split_chunks)
    chunk_attention = staticmethod(chunks.chunk_attention)
    route = staticmethod(moe.route)
    sample = staticmethod(sample.sample)
    head_norm_rope = staticmethod(draft.head_norm_rope)
    kv_write = staticmethod(draft.kv_write)
    block_attention = staticmethod(draft.block_attention)
    top_logprobs = staticmethod(draft.top_logprobs)

    def __init__(self, activations: str = "float32") -> None:
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations: {activations!r} is not one of {', '.join(ACTIVATIONS)}")
        self.activations = activations
        self._storage: dict[str, Any] = {**_FIXED, "bf16": ACTIVATIONS[activations]}
        self._buffers: dict[str, Array] = {}
        self._hit: list[int] = []
        self._weights = Arena()

    def moe_w4(self, x: Array, expert: I32, weight: F32, w13: Any, w2: Any, base: Array, *, out: Array) -> None:
        self._hit.append(moe.moe_w4(x, expert, weight, w13, w2, base, out=out))

    def experts_hit(self) -> float:
        """Distinct experts, the mean over the moe_w4 calls since this was asked last; 0 without one."""
        hit, self._hit = self._hit, []
        return sum(hit) / len(hit) if hit else 0.0

    def param(self, weight: Array | Source) -> Array:
        """A weight as the ops want it: bf16 becomes float32 with the same values."""
        array = weight.read() if isinstance(weight, Source) else weight
        dtype = np.float32 if array.dtype == ml_dtypes.bfloat16 else array.dtype
        held = self._weights.empty(array.shape, dtype)
        held[...] = array
        return held

    def param_w4(self, weight: W4 | W4Source) -> Any:
        return moe.Experts(weight.pack() if isinstance(weight, W4Source) else weight)

    def zeros(self, shape: tuple[int, ...], dtype: str = "bf16") -> Array:
        """A cache: memory that outlives a step."""
        return np.zeros(shape, self._storage[dtype])

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str = "bf16") -> Array:
        """The buffer of that name, viewed in `shape`; contents undefined. It grows to the largest shape asked for."""
        count = math.prod(shape)
        held = self._buffers.get(name)
        if held is None or held.size < count or held.dtype != self._storage[dtype]:
            held = np.empty(max(count, 1), self._storage[dtype])
            self._buffers[name] = held
        return held[:count].reshape(shape)

    def chunk_room(self, shape: ChunkShape) -> int:
        """0: all rows are attended absorbed, so that a row's bits do not depend on its chunk's length."""
        return 0

    def host(self, array: Array) -> Array:
        """A result on the host, safe from the next step."""
        return np.array(array)
