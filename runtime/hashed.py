"""Numbers from a key and their index, the same bits here and in kernels_cu/fill.cu: weights for shapes that have no checkpoint."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from runtime.source import HashWindow
from runtime.types import Array

U32 = NDArray[np.uint32]
UNIT = 65536.0 / math.sqrt(3.0)  # standard deviation of a sum of four uniforms of 16 bits


def step_of(spread: float) -> float:
    """What the centred sum is multiplied by, a float32."""
    return float(np.float32(spread / UNIT))


def hashed(window: HashWindow) -> Array:
    """[n, k] of the window: near normal about `mean`, within 3.5 `spread`, in bf16 or f32; of i32 eight codes of mean 8: a 0 becomes an 8.

    Uniform codes have mean 7.5, half a scale too little in every weight. An expert's outputs then share a direction, which grows
    from layer to layer until all tokens choose the same experts.
    """
    rows, cols = (np.arange(*span, dtype=np.uint64) for span in (window.rows, window.cols))
    index: NDArray[np.uint64] = rows[:, None] * np.uint64(window.width) + cols
    with np.errstate(over="ignore"):
        a = _mix(index.astype(np.uint32) ^ _mix(np.uint32(window.key) + (index >> np.uint64(32)).astype(np.uint32)))
        if window.dtype == "i32":
            none = ~(a | (a >> np.uint32(1)) | (a >> np.uint32(2)) | (a >> np.uint32(3))) & np.uint32(0x11111111)
            codes: Array = (a | (none << np.uint32(3))).view(np.int32)
            return codes
        b = _mix(a + np.uint32(0x9E3779B9))
    low = np.uint32(0xFFFF)
    total = ((a & low) + (a >> np.uint32(16)) + (b & low) + (b >> np.uint32(16))).astype(np.int32) - 131070
    value: NDArray[np.float32] = np.float32(window.mean) + total.astype(np.float32) * np.float32(step_of(window.spread))
    if window.dtype not in ("bf16", "f32"):
        raise ValueError(f"hashed weights are bf16, f32 or i32, not {window.dtype}")
    made: Array = value if window.dtype == "f32" else value.astype(ml_dtypes.bfloat16)
    return made


def _mix(x: U32) -> U32:
    """A bijection of 32 bits whose output bits depend on all input bits (C. Wellons, "lowbias32")."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
