"""The way of bytes from the host to a device: page-locked memory and a stream of its own, so that copies wait for nothing else."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.kernels_cu._launch import _check, _driver, _held

if TYPE_CHECKING:
    from runtime.kernels_cu.device import Device

U8 = NDArray[np.uint8]
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_SLEEPING, _NO_TIMING = 1, 2  # CU_EVENT_BLOCKING_SYNC: who waits leaves its core to those who read; CU_EVENT_DISABLE_TIMING


class Link(Protocol):
    """stream: where copies are enqueued, and kernels that take up what was copied."""

    stream: int

    def pinned(self, nbytes: int) -> U8:
        """Page-locked host memory; lives until `close`."""

    def use(self) -> None:
        """To be called once by each further thread that enqueues or waits here."""

    def send(self, host: U8, to: int) -> None:
        """Enqueues a copy of pinned memory to a device address."""

    def mark(self, slot: int) -> None:
        """Remembers under a number what is enqueued so far."""

    def wait(self, slot: int) -> None:
        """Returns when what was enqueued up to the last `mark` of that number is done; at once if there was none."""

    def begin(self) -> None:
        """What is enqueued from now on runs after what the device's stream holds."""

    def end(self) -> None:
        """What the device's stream gets from now on runs after all that was enqueued here."""

    def close(self) -> None:
        """Waits for all copies and frees the pinned memory."""


class CudaLink:
    """A `Link` of the current context."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        stream = ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        self.stream = int(stream.value or 0)
        self._memory: list[ctypes.c_void_p] = []
        self._events: dict[int, ctypes.c_void_p] = {}
        self._order = _event()

    def pinned(self, nbytes: int) -> U8:
        memory = ctypes.c_void_p()
        _call("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
        self._memory.append(memory)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(memory.value or 0))

    def use(self) -> None:
        _call("cuCtxSetCurrent", self._context)

    def send(self, host: U8, to: int) -> None:
        source, size = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes)
        _short("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(to), source, size, ctypes.c_void_p(self.stream))

    def mark(self, slot: int) -> None:
        if slot not in self._events:
            self._events[slot] = _event()
        _short("cuEventRecord", self._events[slot], ctypes.c_void_p(self.stream))

    def wait(self, slot: int) -> None:
        if slot in self._events and _held().cuEventQuery(self._events[slot]):  # not yet, or a fault, which the next call tells
            _call("cuEventSynchronize", self._events[slot])

    def begin(self) -> None:
        self._after(self._device.stream, self.stream)

    def end(self) -> None:
        self._after(self.stream, self._device.stream)

    def close(self) -> None:
        _call("cuStreamSynchronize", ctypes.c_void_p(self.stream))
        for memory in self._memory:
            _call("cuMemFreeHost", memory)
        self._memory = []

    def _after(self, first: int, then: int) -> None:
        """Work enqueued on `then` from now on waits for what `first` holds."""
        _short("cuEventRecord", self._order, ctypes.c_void_p(first))
        _short("cuStreamWaitEvent", ctypes.c_void_p(then), self._order, ctypes.c_uint(0))


def _event() -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    _call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_SLEEPING | _NO_TIMING))
    return event


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _short(name: str, *arguments: Any) -> None:
    _check(name, getattr(_held(), name)(*arguments))
