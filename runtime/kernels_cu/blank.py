"""A device without memory or kernels: addresses only, and a note of what is asked for. What a model of any size records on it is what
a GPU would launch and hold, in configuration, number and bytes (with `_tensor_map.blank_maps`, where no driver is)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.kernels_cu._call import Call
from runtime.kernels_cu.device import ALIGNMENT
from runtime.kernels_cu.linear_lt import Product
from runtime.kernels_cu.link import Link
from runtime.types import Array

_SMEM_BYTES, _THREADS = 228 << 10, 2048  # of an SM; a block has 1 KiB for itself


class BlankDevice:
    """gpu, arch and sms as a real device has them. builds: (source, constants) -> entries; nbytes: held now."""

    stream = 0

    def __init__(self, arch: str = "sm_90a", sms: int = 132, gpu: str = "h200") -> None:
        self.arch, self.sms, self.gpu = arch, sms, gpu
        self.builds: dict[tuple[str, tuple[tuple[str, int], ...]], Sequence[str]] = {}
        self.nbytes, self._next, self._held = 0, 1 << 40, dict[int, int]()

    def alloc(self, nbytes: int) -> int:
        size, address = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT, self._next
        self._held[address], self._next = size, self._next + size
        self.nbytes += size
        return address

    def free(self, address: int) -> None:
        self.nbytes -= self._held.pop(address)

    def upload(self, address: int, array: Array) -> None:
        """Nothing is held."""

    def download(self, address: int, out: Array) -> None:
        raise RuntimeError("a device without memory holds nothing that could be read")

    def functions(self, source: str, defines: Mapping[str, int], entries: Sequence[str]) -> Mapping[str, Any]:
        self.builds[source, tuple(sorted(defines.items()))] = entries
        return dict.fromkeys(entries, source)

    def resident(self, function: Any, threads: int, smem_bytes: int) -> int:
        return max(1, min(_SMEM_BYTES // (smem_bytes + 1024), _THREADS // threads))

    def prepare(self, call: Call, functions: Mapping[str, Any], keep: tuple[Any, ...] = ()) -> Any:
        if call.entry not in functions:
            raise ValueError(f"{call.entry} is none of {', '.join(functions)}")
        return call

    def multiply(self, product: Product, w: int, x: int, out: int, *, invariant: bool = False, keep: tuple[Any, ...] = ()) -> Any:
        return product

    def link(self) -> Link:
        raise RuntimeError("a device without memory has no weights to fetch")

    def synchronize(self) -> None:
        """Nothing is on its way."""
