"""Timing one launch at load with cold weights."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from typing import Any

from runtime.kernels_cu._launch import _check, _driver
from runtime.kernels_cu.device import Device

FLUSH_BYTES = 128 << 20  # twice an H200's 60 MiB of L2; writing it takes 40 us, in which the host enqueues the rest
REPEATS = 7


class Stopwatch:
    """On a device's stream. `cold_us` takes FLUSH_BYTES of its memory and gives them back; not in a capture."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[ctypes.c_void_p] = []

    def cold_us(self, run: Callable[[int], None]) -> float:
        """Median microseconds of run(stream) over REPEATS, L2 flushed before each; one run ahead warms the code up."""
        stream, flush = self._device.stream, self._device.alloc(FLUSH_BYTES)
        while len(self._events) < 2:
            event = ctypes.c_void_p()
            _call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
            self._events.append(event)
        start, stop = self._events
        samples = []
        run(stream)
        for _ in range(REPEATS):
            _call("cuMemsetD32Async", ctypes.c_uint64(flush), ctypes.c_uint(0), ctypes.c_size_t(FLUSH_BYTES // 4), ctypes.c_void_p(stream))
            _call("cuEventRecord", start, ctypes.c_void_p(stream))
            run(stream)
            _call("cuEventRecord", stop, ctypes.c_void_p(stream))
            _call("cuEventSynchronize", stop)
            took = ctypes.c_float()
            _call("cuEventElapsedTime", ctypes.byref(took), start, stop)
            samples.append(took.value * 1e3)
        self._device.free(flush)
        return float(statistics.median(samples))


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))
