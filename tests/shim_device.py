"""A device on the CPU: kernels under the shim, host memory, one multiprocessor. The whole backend runs on it without a GPU.

Blocks run one after another, so kernels whose blocks wait for one another get one block: `sms` is 1, and sm_89's shared memory
holds one block of the experts' kernel. Its library of products multiplies in NumPy.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from runtime.kernels_cu._call import Call
from runtime.kernels_cu.device import ALIGNMENT, check_contiguous
from runtime.kernels_cu.linear_lt import R_16BF, Layout, Product
from tests.host_link import HostLink

ROOT = Path(__file__).parents[1]
ENTRY_FILES = {
    "moe_w4.cu": "moe_entry.cu",
    "moe_route.cu": "route_entry.cu",
    "tree_mla.cu": "mla_entry.cu",
    "tree_mla_rows.cu": "mla_entry.cu",
}
COMPILE = ["g++", "-x", "c++", "-std=c++17", "-DKCPU", "-fno-gnu-unique", "-shared", "-fPIC"]  # -fno-gnu-unique: tests/kcpu/kcpu.h
SANITIZE = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-fsanitize-sections=kcpu_shared"]
KEPT = 1024  # NumPy keeps smaller memory for its next array, poison and all
Get = Callable[[str, dict[str, int]], ctypes.CDLL]


class Shim:
    """shim(source, defines) compiles tests/kcpu/<source> as C++ and loads it; once for each set of constants, also where several
    processes share the folder."""

    def __init__(self, folder: Path, sanitize: bool = False) -> None:
        self._folder = folder
        self._flags = ["-O1", "-Wno-attributes", *(SANITIZE if sanitize else ())]
        self._environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # the compiler goes without
        self._built: dict[tuple[Any, ...], ctypes.CDLL] = {}

    def __call__(self, source: str, defines: Mapping[str, int]) -> ctypes.CDLL:
        key = (source, *sorted(defines.items()))
        if key not in self._built:
            target = self._folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.so"
            part = target.with_suffix(f".{os.getpid()}")  # seen whole or not at all
            flags = [f"-D{name}={value}" for name, value in defines.items()]
            flags += [f"-I{ROOT / 'tests' / 'kcpu'}", f"-I{ROOT / 'runtime' / 'kernels_cu'}"]
            command = [*COMPILE, *self._flags, *flags, "-o", str(part), str(ROOT / "tests" / "kcpu" / source)]
            if not target.exists():
                subprocess.run(command, check=True, env=self._environment)
                os.replace(part, target)
            self._built[key] = ctypes.CDLL(str(target))
        return self._built[key]


class ShimMap(ctypes.Structure):
    """The shim's TensorMap, prim/hopper.cuh."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("rows", "box_rows", "columns", "row_bytes"))]


def shim_map(at: int, rows: int, columns: int, row_bytes: int, box_rows: int) -> ShimMap:
    """As `_tensor_map.tensor_map`, without a driver."""
    return ShimMap(at, rows, box_rows, columns, row_bytes)


@dataclass(frozen=True)
class ShimLaunch:
    """A call of a library's entry; keep: owners of the memory."""

    function: Any
    call: Call
    keep: tuple[Any, ...] = ()

    def run(self, stream: int) -> None:
        shape = (ctypes.c_int * 7)(*self.call.grid, self.call.threads, self.call.smem_bytes, 0, self.call.cluster)
        arguments = (ctypes.c_void_p * len(self.call.arguments))(*(ctypes.addressof(a) for a in self.call.arguments))
        self.function(shape, arguments)

    def __str__(self) -> str:
        return f"{self.call.entry:<20} grid {self.call.grid} block {self.call.threads} smem {self.call.smem_bytes}"


@dataclass(frozen=True)
class NumpyProduct:
    """D = A^T B of column-major matrices, in float32, rounded once. invariant: a column at a time, for BLAS sums a column's terms
    in an order that its company decides."""

    product: Product
    a: int
    b: int
    d: int
    invariant: bool = False

    def run(self, stream: int) -> None:
        p = self.product
        a, b, d = (_view(at, layout, p.batch) for at, layout in ((self.a, p.a), (self.b, p.b), (self.d, p.d)))
        with np.errstate(invalid="ignore", over="ignore"):  # dead rows hold anything
            weights, each = a.astype(np.float32).transpose(0, 2, 1), 1 if self.invariant else p.b.cols
            for i in range(0, p.b.cols, each):
                d[:, :, i : i + each] = np.matmul(weights, b[:, :, i : i + each].astype(np.float32)).astype(d.dtype)

    def __str__(self) -> str:
        return f"{'numpy product':<20} M {self.product.b.cols} N {self.product.a.cols} K {self.product.a.rows} x{self.product.batch}"


class ShimDevice:
    """`runtime.kernels_cu.device.Device` over a `Shim`."""

    arch, sms, gpu, stream = "sm_89", 1, "shim", 0

    def __init__(self, get: Get) -> None:
        self._get = get
        self._held: dict[int, np.ndarray] = {}

    def alloc(self, nbytes: int) -> int:
        room = np.zeros(max(nbytes, 1) + ALIGNMENT + KEPT, np.uint8)
        address = -(-room.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._held[address] = room
        end = address + -(-nbytes // 16) * 16
        _mark("poison", room.ctypes.data, address - room.ctypes.data)
        _mark("poison", end, room.ctypes.data + room.nbytes - end)
        return address

    def free(self, address: int) -> None:
        room = self._held.pop(address)
        _mark("unpoison", room.ctypes.data, room.nbytes)

    def upload(self, address: int, array: Any) -> None:
        check_contiguous("upload", array)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, out: Any) -> None:
        check_contiguous("download", out)
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def functions(self, source: str, defines: Mapping[str, int], entries: Sequence[str]) -> Mapping[str, Any]:
        library = self._get(ENTRY_FILES.get(source, source.replace(".cu", "_entry.cu")), dict(defines))
        return {name: _entry(library, name) for name in entries}

    def resident(self, function: Any, threads: int, smem_bytes: int) -> int:
        return 1

    def prepare(self, call: Call, functions: Mapping[str, Any], keep: tuple[Any, ...] = ()) -> ShimLaunch:
        function = functions[call.entry]
        if function is None:
            raise ValueError(f"{call.entry} has no entry under the shim")
        return ShimLaunch(function, call, keep)

    def multiply(self, product: Product, w: int, x: int, out: int, *, invariant: bool = False, keep: tuple[Any, ...] = ()) -> NumpyProduct:
        return NumpyProduct(product, w, x, out, invariant)

    def link(self) -> HostLink:
        return HostLink()

    def synchronize(self) -> None:
        """Nothing is on its way: launches run when they are enqueued."""


def _mark(how: str, address: int, nbytes: int) -> None:
    """Tells AddressSanitizer, where it is there, what nobody may touch: memory is as long as was asked for, to the byte."""
    mark = getattr(ctypes.CDLL(None), f"__asan_{how}_memory_region", None)
    if mark is not None and nbytes:
        mark(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _entry(library: ctypes.CDLL, name: str) -> Any:
    """The function of an entry; None where the shim has none (moe_pack is for wgmma)."""
    return getattr(library, f"run_{name}", None) or getattr(library, f"cpu_{name}", None)


def _view(address: int, layout: Layout, batch: int) -> np.ndarray:
    """[batch, rows, cols] of a column-major matrix in host memory."""
    kind = np.dtype(ml_dtypes.bfloat16 if layout.kind == R_16BF else np.float32)
    last = (batch - 1) * layout.batch_stride + (layout.cols - 1) * layout.ld + layout.rows
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * (last * kind.itemsize)).from_address(address)).view(kind)
    steps = [kind.itemsize * s for s in (layout.batch_stride, 1, layout.ld)]
    return np.lib.stride_tricks.as_strided(flat, (batch, layout.rows, layout.cols), steps)
