"""How launches become something that is replayed, and memory that host and device both see: by a GPU, or as a list."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from runtime.kernels_cu.device import CupyDevice, Device, Runnable
from runtime.types import Array


@dataclass(frozen=True, slots=True)
class Mapped:
    """Host memory that kernels reach: host [n] u8, address of its first byte for them, a multiple of 256. keep: its owner."""

    host: Array
    address: int
    keep: Any = None


class Graph(Protocol):
    """Launches that are enqueued together. nodes: how many of each kind."""

    @property
    def nodes(self) -> Mapping[str, int]: ...

    def launch(self) -> None: ...


class Driver(Protocol):
    """What capture and replay need besides a Device."""

    device: Device

    def use(self) -> None:
        """Makes the device the calling thread's, which a thread needs before anything else here."""

    def mapped(self, nbytes: int) -> Mapped:
        """New memory, zero."""

    def capture(self, runs: Sequence[Runnable]) -> Graph:
        """The launches as one graph, in order; they do not run now."""

    def failure(self) -> str | None:
        """Why the stream will never finish, None while it works or is done; does not wait."""

    def time_us(self, graph: Graph, repeats: int) -> float | None:
        """Microseconds of one launch on the device, the mean of `repeats` in a row; None where nothing can be timed."""

    def free_bytes(self) -> tuple[int, int] | None:
        """Device memory free and in all; None where it is the host's."""


class Listed:
    """Launches one after the other: eager execution, with what a graph has to offer otherwise."""

    def __init__(self, runs: Sequence[Runnable], stream: int) -> None:
        self._runs, self._stream = tuple(runs), stream
        self.nodes: Mapping[str, int] = {"kernel": len(self._runs)}

    def launch(self) -> None:
        for run in self._runs:
            run.run(self._stream)


class CudaDriver:
    """A CUDA device. eager: nothing is captured; launches go out one by one (some 5 us of host time each)."""

    def __init__(self, device: CupyDevice, eager: bool = False) -> None:
        self.device: Device = device
        self.peers: Callable[[], str | None] | None = None  # why other ranks will never answer; None: there are none
        self.eager, self._use = eager, device.use

    def use(self) -> None:
        self._use()

    def mapped(self, nbytes: int) -> Mapped:
        from runtime.kernels_cu._graph import MappedMemory

        memory = MappedMemory(nbytes)
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(memory.host_address))
        return Mapped(host, memory.address, memory)

    def capture(self, runs: Sequence[Runnable]) -> Graph:
        from runtime.kernels_cu._graph import ALLOWED, CapturedGraph
        from runtime.kernels_cu.peers_cuda import NCCL_NODES

        allowed = ALLOWED if self.peers is None else NCCL_NODES
        return Listed(runs, self.device.stream) if self.eager else CapturedGraph(self.device.stream, runs, allowed)

    def failure(self) -> str | None:
        from runtime.kernels_cu._graph import stream_failure

        return stream_failure(self.device.stream) or (self.peers() if self.peers else None)

    def time_us(self, graph: Graph, repeats: int) -> float | None:
        from runtime.kernels_cu._graph import Interval

        interval = Interval(self.device.stream)
        graph.launch()
        interval.begin()
        for _ in range(repeats):
            graph.launch()
        return interval.end_us() / repeats

    def free_bytes(self) -> tuple[int, int] | None:
        from runtime.kernels_cu._graph import free_memory

        return free_memory()


class ListDriver:
    """A device whose memory is the host's: launches run when their list does. What tests without a GPU use."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def use(self) -> None:
        """The host's memory is every thread's."""

    def mapped(self, nbytes: int) -> Mapped:
        room = np.zeros(nbytes + 256, np.uint8)
        skip = -int(room.ctypes.data) % 256
        return Mapped(room[skip : skip + nbytes], int(room.ctypes.data) + skip, room)

    def capture(self, runs: Sequence[Runnable]) -> Graph:
        return Listed(runs, self.device.stream)

    def failure(self) -> str | None:
        return None

    def time_us(self, graph: Graph, repeats: int) -> float | None:
        return None

    def free_bytes(self) -> tuple[int, int] | None:
        return None
