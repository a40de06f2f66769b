"""Hidden states between the GPUs of two stages, recorded like ops: NCCL's point-to-point in a step's graph.

Run on the CPU shim by several processes, and on two H200.

Rank r of a stage sends to rank r of the next one, so each pair has a connection, and each host's adapters all work. A stage's
first launch of a step waits on the device for the stage before, its last hands on: no host takes part.
"""

from __future__ import annotations

from typing import Protocol

from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.device import Runnable
from runtime.kernels_cu.recorder import Recorded, Recorder


class Line(Protocol):
    """This rank's connections to the stages before and after; NCCL on GPUs."""

    def receive(self, address: int, nbytes: int) -> Runnable:
        """The bytes become those that the stage before sends."""

    def send(self, address: int, nbytes: int) -> Runnable:
        """Hands the bytes to the next stage."""


class DeviceNeighbours:
    """`runtime.comm.Neighbours` over a recorder's launches. A bucket's dead rows travel too: sizes are fixed when it is recorded."""

    def __init__(self, recorder: Recorder, line: Line) -> None:
        self._recorder, self._line = recorder, line

    def receive(self, x: DeviceArray) -> None:
        self._recorder.recorded.append(Recorded("receive", {}, self._line.receive(x.flat, x.nbytes)))

    def send(self, x: DeviceArray) -> None:
        self._recorder.recorded.append(Recorded("send", {}, self._line.send(x.flat, x.nbytes)))
