"""A launch before there is a GPU: which entry, what grid, which arguments.

Families build calls from addresses and numbers alone, so the same call is launched on a device and run by the CPU shim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.kernels_cu._launch import Function, Launch


@dataclass(frozen=True, slots=True)
class Call:
    """entry: name in the source; grid in blocks; threads of a block; dynamic shared bytes; arguments: ctypes values in order.
    pdl, cluster, held: as `Launch`'s."""

    entry: str
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    arguments: tuple[Any, ...]
    pdl: bool = True
    cluster: int = 1
    held: bool = False

    def launch(self, functions: Mapping[str, Function], keep: tuple[Any, ...] = ()) -> Launch:
        """The prepared launch of this call on the current device; keep: owners of the memory it points at."""
        block = self.threads, 1, 1
        return Launch(functions[self.entry], self.grid, block, self.smem_bytes, self.arguments, self.pdl, keep, self.cluster, self.held)


def ptr(address: int) -> ctypes.c_void_p:
    """An address; 0 is null."""
    return ctypes.c_void_p(address)


def i32(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def i64(value: int) -> ctypes.c_longlong:
    return ctypes.c_longlong(value)


def f32(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)


def vectors(op: str, name: str, width: int, item_bytes: int = 2) -> int:
    """16-byte vectors in a row of `width` numbers. Raises ValueError where the row is no multiple of 16 bytes."""
    if width < 1 or width * item_bytes % 16:
        raise ValueError(f"{op}: {name} = {width} numbers of {item_bytes} bytes; a row must be a positive multiple of 16 bytes")
    return width * item_bytes // 16


def blocks(count: int, each: int) -> int:
    """Blocks that cover `count` with `each`."""
    return -(-count // each)
