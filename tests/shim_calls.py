"""Running a `Call` on the CPU shim, and memory as a device would have it: bfloat16 arrays, poisoned outputs."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from runtime.kernels_cu._call import Call

bf16 = ml_dtypes.bfloat16


def run_call(library: ctypes.CDLL, call: Call, descending: bool = False) -> None:
    """Runs a call's blocks one after another; a segmentation fault here is an address that the device would fault on too."""
    shape = (ctypes.c_int * 6)(*call.grid, call.threads, call.smem_bytes, int(descending))
    arguments = (ctypes.c_void_p * len(call.arguments))(*(ctypes.addressof(a) for a in call.arguments))
    getattr(library, f"cpu_{call.entry}")(shape, arguments)


def address(array: Any) -> int:
    """Of an array's first element; 0 for None."""
    return 0 if array is None else int(array.ctypes.data)


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(bf16)


def poisoned(*shape: int, dtype: Any = bf16) -> np.ndarray:
    """An output before its kernel: NaN, or -7 where there is none."""
    return np.full(shape, np.nan if np.dtype(dtype).kind in "fV" else -7, dtype)
