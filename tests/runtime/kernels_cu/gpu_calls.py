"""Calls of the shim's tests on a GPU, and on a stand-in for one: a device whose memory is other memory of the host.

Both are as the fixture `shim`: get(entry file, defines) -> what `run_call` takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.kernels_cu import (
    all_reduce,
    block_attention,
    dense,
    draft,
    gather_ranks,
    linear_skinny,
    mla_prep,
    plan_io,
    sample,
    sample_ranks,
    top_merge,
)  # fmt: skip
from runtime.kernels_cu._call import Call
from tests.shim_calls import Device, run_call

Get = Callable[[str, dict[str, int]], Any]
_MODULES = (
    all_reduce, block_attention, dense, draft, gather_ranks, linear_skinny, mla_prep, plan_io, sample, sample_ranks, top_merge,
)  # fmt: skip
FAMILIES: dict[str, Any] = {f"{module.SOURCE.removesuffix('.cu')}_entry.cu": module for module in _MODULES}


def gpu_calls() -> Get:
    """On the current CUDA device."""
    import cupy

    from runtime.kernels_cu._build import build
    from runtime.kernels_cu._launch import load
    from runtime.kernels_cu.device import arch_of_device

    arch, runtime, held = arch_of_device(), cupy.cuda.runtime, []

    def upload(array: np.ndarray) -> int:
        held.append(cupy.cuda.alloc(array.nbytes))
        runtime.memcpy(held[-1].ptr, array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice)
        return int(held[-1].ptr)

    def download(at: int, array: np.ndarray) -> None:
        runtime.memcpy(array.ctypes.data, at, array.nbytes, runtime.memcpyDeviceToHost)

    def get(source: str, defines: dict[str, int]) -> Device:
        family = FAMILIES[source]
        functions = load(build(family.SOURCE, defines, arch).code, family.ENTRIES)

        def launch(call: Call) -> None:
            call.launch(functions).run(cupy.cuda.get_current_stream().ptr)
            runtime.deviceSynchronize()

        return Device(upload, launch, download, held.clear)

    return get


def stand_in_calls(shim: Get) -> Get:
    """Kernels are the shim's: what finds a pointer that is not moved."""

    def get(source: str, defines: dict[str, int]) -> Device:
        library, copies = shim(source, defines), {}

        def upload(array: np.ndarray) -> int:
            room = np.empty(array.nbytes + 64, np.uint8)
            at = -(-int(room.ctypes.data) // 64) * 64
            copies[at] = room
            ctypes.memmove(at, array.ctypes.data, array.nbytes)
            return at

        def download(at: int, array: np.ndarray) -> None:
            ctypes.memmove(array.ctypes.data, at, array.nbytes)

        return Device(upload, lambda call: run_call(library, call), download, copies.clear)

    return get
