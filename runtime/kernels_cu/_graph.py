"""CUDA graphs and mapped memory through the driver: capture, what was captured, launch, time, and whether the stream still lives."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.kernels_cu._launch import LaunchError, _check, _driver
from runtime.kernels_cu.device import Runnable

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: an allocation by this thread ends the capture with an error
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_MAPPED = 2  # CU_MEMHOSTALLOC_DEVICEMAP
NODE_KINDS = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "wait", 7: "record", 10: "alloc", 11: "free"}
ALLOWED = frozenset({"kernel", "memcpy", "memset"})  # cuBLASLt may clear its workspace; NCCL's event nodes come with more ranks


class CapturedGraph:
    """Launches recorded from a stream, instantiated. `nodes` counts them by kind; what the launches point at is the caller's."""

    def __init__(self, stream: int, runs: Iterable[Runnable], allowed: frozenset[str] = ALLOWED) -> None:
        self._stream = ctypes.c_void_p(stream)
        graph, execution = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_THREAD_LOCAL))
        try:
            for run in runs:
                run.run(stream)
        finally:  # a capture left open would spoil the stream for good
            status = _driver().cuStreamEndCapture(self._stream, ctypes.byref(graph))
        _check("cuStreamEndCapture", status)
        self.nodes: Mapping[str, int] = _count_nodes(graph)
        strange = sorted(set(self.nodes) - allowed)
        if strange:
            raise LaunchError(
                f"capture: the graph holds {', '.join(f'{self.nodes[k]} {k} node(s)' for k in strange)}; only {sorted(allowed)} may be"
            )
        _call("cuGraphInstantiateWithFlags", ctypes.byref(execution), graph, ctypes.c_ulonglong(0))
        _call("cuGraphDestroy", graph)
        _call("cuGraphUpload", execution, self._stream)
        self._execution = execution
        self._launch = _driver().cuGraphLaunch
        self._end = weakref.finalize(self, _driver().cuGraphExecDestroy, execution)

    def launch(self) -> None:
        """Enqueues the whole graph."""
        status = self._launch(self._execution, self._stream)
        if status:
            _check("cuGraphLaunch", status)


class MappedMemory:
    """Pinned host memory that kernels read and write at `address`; page-aligned, zero at first, freed with the object."""

    def __init__(self, nbytes: int) -> None:
        pointer, address = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)), ctypes.c_uint(_MAPPED))
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), pointer, ctypes.c_uint(0))
        assert pointer.value is not None and address.value is not None
        self.host_address, self.address, self.nbytes = pointer.value, address.value, nbytes
        ctypes.memset(pointer.value, 0, nbytes)
        self._end = weakref.finalize(self, _driver().cuMemFreeHost, pointer)


class Interval:
    """Two events on a stream."""

    def __init__(self, stream: int) -> None:
        self._stream = ctypes.c_void_p(stream)
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self._events:
            _call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))

    def begin(self) -> None:
        _call("cuEventRecord", self._events[0], self._stream)

    def end_us(self) -> float:
        """Waits for what was enqueued since `begin`; microseconds on the device."""
        _call("cuEventRecord", self._events[1], self._stream)
        _call("cuEventSynchronize", self._events[1])
        took = ctypes.c_float()
        _call("cuEventElapsedTime", ctypes.byref(took), *self._events)
        return took.value * 1e3


def stream_failure(stream: int) -> str | None:
    """What is wrong with a stream, None while it works or is done. Does not wait."""
    status = _driver().cuStreamQuery(ctypes.c_void_p(stream))
    if status in (0, _NOT_READY):
        return None
    try:
        _check("cuStreamQuery", status)
    except LaunchError as error:
        return str(error)
    return None


def free_memory() -> tuple[int, int]:
    """Bytes free and in all of the current device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _count_nodes(graph: ctypes.c_void_p) -> Mapping[str, int]:
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    _call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    kinds: Counter[str] = Counter()
    for node in nodes[: count.value]:
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        kinds[NODE_KINDS.get(kind.value, f"kind {kind.value}")] += 1
    return dict(kinds)


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))
