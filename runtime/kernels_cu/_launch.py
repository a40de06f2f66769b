"""Loading cubins and launching them: CuPy for the context and memory, the driver's cuLaunchKernelEx for the rest.

CuPy launches without attributes, so programmatic dependent launch (0.85 -> 0.57 us a node of a graph, one H200) needs the
driver call. A `Launch` is prepared once and then runs eagerly, is captured by a stream in capture, or prints itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_PLAIN_SMEM_BYTES = 48 << 10
_Library = TypeVar("_Library", bound=ctypes.CDLL)


class LaunchError(RuntimeError):
    """A driver call that failed."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    ]


@cache
def _driver() -> ctypes.CDLL:
    return _typed(ctypes.CDLL("libcuda.so.1"))


@cache
def _held() -> ctypes.PyDLL:
    """The driver, called without giving Python's lock away: for calls of a few microseconds, after which 16 readers of weights would
    be waiting for it in front of the caller. Not for launches that may wait for another thread's."""
    return _typed(ctypes.PyDLL("libcuda.so.1"))


def _typed(lib: _Library) -> _Library:
    lib.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    lib.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    return lib


def _check(what: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise LaunchError(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


@dataclass(frozen=True, slots=True)
class Function:
    """An entry of a loaded cubin. `module` keeps the code alive. smem: the dynamic shared bytes that it may have, one number."""

    name: str
    handle: int
    module: Any
    smem: list[int] = field(default_factory=lambda: [_PLAIN_SMEM_BYTES], compare=False)

    def allow_smem(self, smem_bytes: int) -> None:
        """Permits that much dynamic shared memory a block; needed above 48 KiB. Never less than before: launches prepared for
        other sizes share the function."""
        if smem_bytes > self.smem[0]:
            status = _driver().cuFuncSetAttribute(self.handle, _DYNAMIC_SMEM, smem_bytes)
            _check(f"{self.name}: {smem_bytes} bytes of shared memory", status)
            _check(self.name, _driver().cuFuncSetAttribute(self.handle, _CARVEOUT, 100))
            self.smem[0] = smem_bytes

    def blocks_per_sm(self, threads: int, smem_bytes: int) -> int:
        """How many blocks of that size an SM holds at once."""
        count = ctypes.c_int()
        self.allow_smem(smem_bytes)
        status = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), ctypes.c_void_p(self.handle), ctypes.c_int(threads), ctypes.c_size_t(smem_bytes)
        )
        _check(f"{self.name}: occupancy", status)
        return count.value


def load(code: bytes, names: Sequence[str]) -> dict[str, Function]:
    """Loads a cubin into the current CuPy device and finds its entries."""
    import cupy

    module = cupy.cuda.function.Module()
    module.load(code)
    return {name: Function(name, int(module.get_function(name).ptr), module) for name in names}


@dataclass(slots=True)
class Launch:
    """One kernel launch, prepared: grid, block, shared bytes, arguments as ctypes values in order.

    keep: whatever owns the memory behind the arguments. pdl: may start before its predecessor ends; the kernel then
    waits itself (prim::pdl_wait). cluster: blocks along x that run together and reach each other's shared memory (sm_90).
    held: keeps Python's lock while it is enqueued.
    """

    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    arguments: tuple[Any, ...]
    pdl: bool = True
    keep: tuple[Any, ...] = ()
    cluster: int = 1
    held: bool = False
    _config: _LaunchConfig = field(init=False, repr=False)
    _pointers: Any = field(init=False, repr=False)
    _attributes: ctypes.Array[_Attribute] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.function.allow_smem(self.smem_bytes)
        wanted = [(_PDL, (1,))] * self.pdl + [(_CLUSTER, (self.cluster, 1, 1))] * (self.cluster > 1)
        self._attributes = (_Attribute * 2)(*(_Attribute(name, 0, (ctypes.c_uint32 * 16)(*value)) for name, value in wanted))
        self._pointers = (ctypes.c_void_p * len(self.arguments))(*(ctypes.addressof(a) for a in self.arguments))
        self._config = _LaunchConfig(
            (ctypes.c_uint32 * 3)(*self.grid),
            (ctypes.c_uint32 * 3)(*self.block),
            self.smem_bytes,
            None,
            ctypes.addressof(self._attributes),
            len(wanted),
        )

    def run(self, stream: int) -> None:
        """Enqueues on a stream (its handle); in capture, records a node."""
        self._config.stream = stream
        driver = _held() if self.held else _driver()
        status = driver.cuLaunchKernelEx(ctypes.addressof(self._config), self.function.handle, self._pointers, None)
        _check(f"launch of {self.function.name}", status)

    def __str__(self) -> str:
        clusters = f" clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{self.function.name:<20} grid {self.grid} block {self.block} smem {self.smem_bytes}{' pdl' if self.pdl else ''}{clusters}"
