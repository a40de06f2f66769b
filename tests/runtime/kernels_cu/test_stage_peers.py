"""What is asked of NCCL between stages: whom a rank sends to, and that a chain of stages connects before anything is captured."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from runtime.kernels_cu import peers_cuda
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.peers_cuda import NcclGroup, open_line
from runtime.kernels_cu.stage_peers import DeviceNeighbours
from tests.shim_device import ShimDevice

UINT8 = 1


class Wire:
    """NCCL's point-to-point among threads: a send and its receive meet and are of one size."""

    def __init__(self, rank: int, wires: dict[tuple[int, int], queue.Queue[int]]) -> None:
        self.rank, self.wires, self.said = rank, wires, list[tuple[str, int, int]]()

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == UINT8 and address
        self.said.append(("send", peer, count))
        self.wires[self.rank, peer].put(count)

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == UINT8 and address
        self.said.append(("recv", peer, count))
        assert self.wires[peer, self.rank].get(timeout=5) == count


class Column:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Groups of three stages whose NCCL is `Wire`."""
    wires: dict[tuple[int, int], queue.Queue[int]] = {(a, a + 1): queue.Queue() for a in range(2)}

    def init(self: Any, host: Any) -> None:
        self._nccl, self._rank = type("nccl", (), {"NCCL_UINT8": UINT8}), host.rank
        self._comm = Wire(host.rank, wires)

    monkeypatch.setattr(NcclGroup, "__init__", init)
    return lambda rank, ops: open_line(ops, Column(rank, 3), 64)


def test_every_pair_is_connected_once_for_each_size(lines: Any, shim: Any) -> None:
    groups: dict[int, Any] = {}

    def run(rank: int) -> None:
        groups[rank] = lines(rank, CudaBackend(ShimDevice(shim)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    sizes = [2 * 64 * rows for rows in peers_cuda.WARM]
    assert groups[0]._comm.said == [("send", 1, size) for size in sizes]
    assert groups[1]._comm.said == [pair for size in sizes for pair in (("recv", 0, size), ("send", 2, size))]
    assert groups[2]._comm.said == [("recv", 1, size) for size in sizes]


def test_hidden_states_are_recorded_as_one_message(shim: Any) -> None:
    ops = CudaBackend(ShimDevice(shim))
    group = NcclGroup.__new__(NcclGroup)
    group._nccl, group._rank, group._comm = type("nccl", (), {"NCCL_UINT8": UINT8}), 1, type("comm", (), {"send": 0, "recv": 0})
    near, x = DeviceNeighbours(ops, group), ops.buffer("x", (3, 4, 64))
    with ops.recording() as records:
        near.receive(x[:2])
        near.send(x)
        assert [(r.op, str(r.run)) for r in records] == [("receive", "nccl receive of 1024 bytes"), ("send", "nccl send of 1536 bytes")]
        with pytest.raises(ValueError, match="not contiguous"):
            near.send(x[:, :2])
