"""Compressed-tensors triples to `runtime.w4`'s layout on the device: the call of repack_w4.cu, and the exponent it finds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from runtime.kernels_cu._call import Call, blocks
from runtime.w4 import GROUP, UNIT_ROWS, scale_exponent

SOURCE = "repack_w4.cu"
ENTRIES = ("repack_w4",)
_GROUPS, _VECTORS = 4, 72  # kGroups, kVectors of repack_w4.cu


class Params(ctypes.Structure):
    """`Params` of repack_w4.cu."""

    _fields_ = [
        ("words", ctypes.c_void_p * 2), ("scale", ctypes.c_void_p * 2), ("out", ctypes.c_void_p), ("largest", ctypes.c_void_p),
        ("strips", ctypes.c_int), ("groups", ctypes.c_int), ("parts", ctypes.c_int),
    ]  # fmt: skip


def call(words: Sequence[int], scale: Sequence[int], out: int, largest: int, *, rows: int, k: int) -> Call:
    """Packs `rows` packed rows of K = k inputs. words, scale: addresses, 16-aligned, of one part or of gate and up, each with
    rows / parts rows [.., k/8] i32 and [.., k/32] bf16; largest: a u32 that is raised to the largest |scale| seen, as bf16 bits.

    Raises ValueError for sizes that the layout can not hold.
    """
    parts = len(words)
    if parts not in (1, 2) or len(scale) != parts or rows < UNIT_ROWS or rows % UNIT_ROWS or k < GROUP or k % GROUP:
        raise ValueError(f"repack_w4: {parts} parts of {rows} rows and {k} inputs; want 1 or 2, rows in {UNIT_ROWS}s, inputs in {GROUP}s")
    both = ctypes.c_void_p * 2
    strips, groups = rows // UNIT_ROWS, k // GROUP
    params = Params(both(*words), both(*scale), out, largest, strips, groups, parts)
    return Call(ENTRIES[0], (blocks(groups, _GROUPS), strips, 1), _GROUPS * _VECTORS, 0, (params,), held=True)


def exponent_of(largest: int) -> int:
    """`W4.exponent` of experts whose largest |scale| has these bf16 bits. Raises ValueError where it is no finite number."""
    return scale_exponent(np.array([largest], np.uint16).view(ml_dtypes.bfloat16))
