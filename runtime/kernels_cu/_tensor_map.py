"""Descriptions of matrices for the copy engine (CUtensorMap)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_BLANK = ContextVar("blank", default=False)


@contextmanager
def blank_maps() -> Iterator[None]:
    """Descriptions made in here describe nothing and need no driver: for recording what will not run."""
    token = _BLANK.set(True)
    try:
        yield
    finally:
        _BLANK.reset(token)


def tensor_map(address: int, rows: int, columns: int, row_bytes: int, box_rows: int) -> Any:
    """A [rows, columns] bf16 matrix whose rows start `row_bytes` apart, in boxes of box_rows x 64 columns: 128-byte swizzle,
    zero out of bounds; what L2 lacks comes 256 bytes at a time. The value is a kernel's argument. Raises
    ValueError where the driver refuses."""
    if _BLANK.get():
        return (ctypes.c_char * 128)()
    room = (ctypes.c_char * 192)()
    start = -ctypes.addressof(room) % 64
    target = (ctypes.c_char * 128).from_buffer(room, start)
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(row_bytes)
    box, steps = (ctypes.c_uint32 * 2)(64, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    bf16, swizzle_128, promotion = 9, 3, 3
    status = encode(target, bf16, 2, ctypes.c_void_p(address), sizes, strides, box, steps, 0, swizzle_128, promotion, 0)
    if status:
        raise ValueError(
            f"no tensor map for {rows} x {columns} at {address:#x}, rows {row_bytes} bytes apart, boxes of {box_rows}: CUDA error {status}"
        )
    return target
