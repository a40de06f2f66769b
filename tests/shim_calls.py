"""Running a `Call` on the CPU shim or on a device, and memory as a device would have it: bfloat16 arrays, poisoned outputs.

Tests state calls over NumPy arrays. The shim takes their addresses as they are; a `Device` copies the arrays that `address`
has seen, puts its own addresses in their place, launches, and copies everything back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from runtime.kernels_cu._call import Call

bf16 = ml_dtypes.bfloat16


SEEN: dict[int, np.ndarray] = {}  # owners of the memory that calls point at, by address


class Device:
    """Where a call may run instead of the shim. upload(array) -> address, launch(call), download(address, array), free()."""

    def __init__(
        self, upload: Callable[[Any], int], launch: Callable[[Call], None], download: Callable[[int, Any], Any], free: Callable[[], None]
    ) -> None:
        self._upload, self._launch, self._download, self._free = upload, launch, download, free

    def run(self, call: Call) -> None:
        arrays = list(SEEN.values())
        there = [self._upload(a) if a.nbytes else 0 for a in arrays]
        moved = [(a.ctypes.data, a.nbytes, at) for a, at in zip(arrays, there, strict=True)]
        arguments = tuple(_moved(argument, moved) for argument in call.arguments)
        self._launch(replace(call, arguments=arguments))
        for array, at in zip(arrays, there, strict=True):
            if at:
                self._download(at, array)
        self._free()


def _moved(value: Any, moved: list[tuple[int, int, int]]) -> Any:
    """A ctypes argument with every pointer of it on the device, those of structures in it too, but an array of pointers as it is: ranks'
    regions, which no array is. Raises ValueError for memory that `address` has not seen."""
    if isinstance(value, ctypes.Structure):
        copy = type(value).from_buffer_copy(value)
        for name, kind in type(value)._fields_:
            if kind is ctypes.c_void_p:
                setattr(copy, name, _moved(ctypes.c_void_p(getattr(value, name)), moved))
            elif issubclass(kind, ctypes.Array) and issubclass(kind._type_, ctypes.Structure):
                setattr(copy, name, kind(*(_moved(one, moved) for one in getattr(value, name))))
        return copy
    if not isinstance(value, ctypes.c_void_p) or not value.value:
        return value
    for first, size, at in moved:
        if first <= value.value < first + max(size, 1):
            return ctypes.c_void_p(at + value.value - first)
    raise ValueError(f"{value.value:#x} lies in no array that went through address()")


def run_call(library: ctypes.CDLL | Device, call: Call, descending: bool = False) -> None:
    """Runs a call's blocks one after another; a segmentation fault here is an address that the device would fault on too."""
    if isinstance(library, Device):
        library.run(call)
        return
    shape = (ctypes.c_int * 7)(*call.grid, call.threads, call.smem_bytes, int(descending), call.cluster)
    arguments = (ctypes.c_void_p * len(call.arguments))(*(ctypes.addressof(a) for a in call.arguments))
    getattr(library, f"cpu_{call.entry}")(shape, arguments)


def address(array: Any) -> int:
    """Of an array's first element; 0 for None. `forget` lets go of the arrays seen."""
    if array is None:
        return 0
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    SEEN[int(owner.ctypes.data)] = owner
    return int(array.ctypes.data)


def forget() -> None:
    SEEN.clear()


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(bf16)


def poisoned(*shape: int, dtype: Any = bf16) -> np.ndarray:
    """An output before its kernel: NaN, or -7 where there is none."""
    return np.full(shape, np.nan if np.dtype(dtype).kind in "fV" else -7, dtype)
