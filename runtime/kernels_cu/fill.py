"""Weights from a hash, written by the device: the call of fill.cu's hash_* entries. Same bits as `runtime.hashed`."""

from __future__ import annotations

import ctypes

from runtime.hashed import step_of
from runtime.kernels_cu._call import Call, blocks
from runtime.source import HashWindow

SOURCE = "fill.cu"
ENTRIES = ("hash_bf16", "hash_f32", "hash_i32")
_THREADS, _EACH = 256, 4  # kThreads, kEach of fill.cu


class Params(ctypes.Structure):
    """`Params` of fill.cu."""

    _fields_ = [
        ("out", ctypes.c_void_p), ("width", ctypes.c_ulonglong), ("row", ctypes.c_ulonglong), ("col", ctypes.c_ulonglong),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("key", ctypes.c_uint32), ("mean", ctypes.c_float), ("step", ctypes.c_float),
    ]  # fmt: skip


def call(window: HashWindow, out: int) -> Call:
    """Writes [n, k] of the window to an address. Raises ValueError for a dtype that the hash does not make."""
    entry = f"hash_{window.dtype}"
    if entry not in ENTRIES:
        raise ValueError(f"hashed weights are bf16, f32 or i32, not {window.dtype}")
    (rows, cols), step = window.shape, step_of(window.spread)
    params = Params(out, window.width, window.rows[0], window.cols[0], rows, cols, window.key, window.mean, step)
    return Call(entry, (rows * blocks(cols, _THREADS * _EACH), 1, 1), _THREADS, 0, (params,), held=True)
