"""What kernels run on: memory, loaded functions, launches. A GPU through CuPy here; tests bring one of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from runtime.kernels_cu._build import build
from runtime.kernels_cu._call import Call
from runtime.kernels_cu._launch import Function, load
from runtime.types import Array

if TYPE_CHECKING:
    from runtime.kernels_cu.linear_lt import Lt, Product
    from runtime.kernels_cu.link import Link

ALIGNMENT = 256  # bytes, of every allocation


class Runnable(Protocol):
    """Work prepared once, then enqueued any number of times, eagerly or while the stream is captured. `str` names it."""

    def run(self, stream: int) -> None: ...


class Device(Protocol):
    """arch: as NVRTC names it (sm_90a). sms: multiprocessors. gpu: short name as in tuned/*.json (h200). stream: a handle.

    Functions are opaque to all but the device that made them.
    """

    arch: str
    sms: int
    gpu: str
    stream: int

    def alloc(self, nbytes: int) -> int:
        """Address of new memory, a multiple of 256, all zero, of whole vectors (16 bytes); it lives as the device does or until `free`."""

    def free(self, address: int) -> None:
        """Gives back what `alloc` gave."""

    def upload(self, address: int, array: Array) -> None:
        """Copies a contiguous host array; done when it returns."""

    def download(self, address: int, out: Array) -> None:
        """Copies into a contiguous host array what the stream's work so far has written."""

    def functions(self, source: str, defines: Mapping[str, int], entries: Sequence[str]) -> Mapping[str, Any]:
        """The entries of a `.cu` of this package built with those constants: built and loaded once."""

    def resident(self, function: Any, threads: int, smem_bytes: int) -> int:
        """How many blocks of that size an SM holds at once."""

    def prepare(self, call: Call, functions: Mapping[str, Any], keep: tuple[Any, ...] = ()) -> Runnable:
        """The launch of a call; keep: what must live as long as it."""

    def multiply(self, product: Product, w: int, x: int, out: int, *, invariant: bool = False, keep: tuple[Any, ...] = ()) -> Runnable:
        """A product of any number of rows by the device's library, prepared: addresses of its A, B and D. invariant: by the
        algorithm that serves all numbers of rows of these weights. Preparing may run it, so not in a capture."""

    def link(self) -> Link:
        """A new way for weights from the host."""

    def synchronize(self) -> None:
        """Waits for the stream."""


class CupyDevice:
    """One CUDA device: memory of CuPy's pool, a stream of its own that waits for no other."""

    def __init__(self, index: int = 0) -> None:
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self.index = index
        self._device = cupy.cuda.Device(index)
        self.use()
        self.arch, self.gpu = arch_of_device(), gpu_name()
        self.sms = int(self._device.attributes["MultiProcessorCount"])
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.stream = int(self._stream.ptr)
        self._held: dict[int, Any] = {}
        self._functions: dict[tuple[Any, ...], Mapping[str, Function]] = {}
        self._lt: Lt | None = None

    def use(self) -> None:
        """Makes it the device of the calling thread, which every thread that allocates, loads or launches must have done."""
        self._device.use()

    def alloc(self, nbytes: int) -> int:
        memory = self._cupy.cuda.alloc(max(nbytes, 1))
        address = int(memory.ptr)
        self._held[address] = memory
        self._runtime.memsetAsync(address, 0, max(nbytes, 1), self.stream)
        return address

    def free(self, address: int) -> None:
        self.synchronize()
        del self._held[address]

    def upload(self, address: int, array: Array) -> None:
        check_contiguous("upload", array)
        if array.nbytes:  # on the stream: a copy of pageable memory on another one may still be on its way when it returns
            self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, self._runtime.memcpyHostToDevice, self.stream)
            self.synchronize()

    def download(self, address: int, out: Array) -> None:
        check_contiguous("download", out)
        if out.nbytes:
            self._runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, self._runtime.memcpyDeviceToHost, self.stream)
            self.synchronize()

    def functions(self, source: str, defines: Mapping[str, int], entries: Sequence[str]) -> Mapping[str, Function]:
        key = (source, *sorted(defines.items()), *entries)
        if key not in self._functions:
            self._functions[key] = load(build(source, defines, self.arch).code, entries)
        return self._functions[key]

    def resident(self, function: Function, threads: int, smem_bytes: int) -> int:
        return function.blocks_per_sm(threads, smem_bytes)

    def prepare(self, call: Call, functions: Mapping[str, Function], keep: tuple[Any, ...] = ()) -> Runnable:
        return call.launch(functions, keep)

    def multiply(self, product: Product, w: int, x: int, out: int, *, invariant: bool = False, keep: tuple[Any, ...] = ()) -> Runnable:
        if self._lt is None:
            from runtime.kernels_cu.linear_lt import open_lt

            self._lt = open_lt(self)
        return self._lt.prepare(product, w, x, out, invariant=invariant, keep=keep)

    def link(self) -> Link:
        from runtime.kernels_cu.link import CudaLink

        return CudaLink(self)

    def synchronize(self) -> None:
        self._stream.synchronize()


def check_contiguous(what: str, array: Array) -> None:
    """ValueError unless the array's numbers lie one after the other."""
    if not array.flags["C_CONTIGUOUS"]:
        raise ValueError(f"{what}: an array of {list(array.shape)} with strides {list(array.strides)} is not contiguous")


def arch_of_device() -> str:
    """sm_80, sm_90a … of CuPy's current device."""
    import cupy

    number = int(cupy.cuda.Device().compute_capability)
    return f"sm_{number}a" if number in (90, 100, 120) else f"sm_{number}"


def gpu_name() -> str:
    """The current device's short name as tuned/*.json and results use it: "NVIDIA H200" is h200."""
    import cupy

    name = str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())
    return name.removeprefix("NVIDIA ").split(" ")[0].lower() if "RTX" not in name else "-".join(name.lower().split()[1:4])
