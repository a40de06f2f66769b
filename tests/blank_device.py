"""A device without memory or kernels: addresses only, and a note of every build that is asked for. What a full-size model records
on it is what a GPU would launch, in configuration, number and scratch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from runtime.kernels_cu import chunk_attention, linear_stream, tree_mla
from runtime.kernels_cu._call import Call
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.linear_lt import Product
from runtime.kernels_cu.recorder import DeviceW4
from runtime.null import PackedShape, ShapeOnly


class BlankDevice:
    """gpu, arch and sms as a real device has them. builds: (source, constants) -> entries; nbytes: allocated."""

    stream = 0

    def __init__(self, arch: str = "sm_90a", sms: int = 132, gpu: str = "h200") -> None:
        self.arch, self.sms, self.gpu = arch, sms, gpu
        self.builds: dict[tuple[str, tuple[tuple[str, int], ...]], Sequence[str]] = {}
        self.nbytes = 0

    def alloc(self, nbytes: int) -> int:
        self.nbytes += -(-max(nbytes, 1) // 256) * 256
        return (1 << 40) + self.nbytes

    def functions(self, source: str, defines: Mapping[str, int], entries: Sequence[str]) -> Mapping[str, Any]:
        self.builds[source, tuple(sorted(defines.items()))] = entries
        return dict.fromkeys(entries, source)

    def resident(self, function: Any, threads: int, smem_bytes: int) -> int:
        return max(1, min((228 << 10) // (smem_bytes + 1024), 2048 // threads))

    def prepare(self, call: Call, functions: Mapping[str, Any], keep: tuple[Any, ...] = ()) -> Any:
        assert call.entry in functions
        return call

    def multiply(self, product: Product, w: int, x: int, out: int, *, invariant: bool = False, keep: tuple[Any, ...] = ()) -> Any:
        return product


def without_driver(monkeypatch: Any) -> None:
    """Tensor maps are the driver's; here they are empty."""
    for family in (chunk_attention, linear_stream, tree_mla):
        monkeypatch.setattr(family, "tensor_map", lambda *_: (ctypes.c_char * 128)())


def placed(value: Any, device: BlankDevice, name: str = "") -> Any:
    """Shapes, at any depth of dataclasses and tuples, as arrays on the device. INT4 weights called w13 are woven."""
    if isinstance(value, ShapeOnly):
        return DeviceArray(device.alloc(value.nbytes), value.shape, value.dtype)
    if isinstance(value, PackedShape):
        return DeviceW4(device.alloc(value.nbytes), value.E, value.N, value.K, int, name == "w13")
    if isinstance(value, tuple):
        return tuple(placed(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: placed(getattr(value, f.name), device, f.name) for f in fields(value)})
    return value
