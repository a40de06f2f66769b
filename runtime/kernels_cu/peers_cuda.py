"""Finding the other GPUs of a group: peer memory over CUDA IPC, NCCL, and which of the two carries what.

NVLink multicast stays off: on hosts whose GPUs are shared it can put them out of service. NCCL_NVLS_ENABLE=0 is set before NCCL
loads, and with it NCCL 2.27.7 and 2.28.9 never reach multicast's creation (read in their source).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.kernels_cu import all_reduce, gather_ranks, sample_ranks
from runtime.kernels_cu._graph import ALLOWED, CapturedGraph, Interval, MappedMemory
from runtime.kernels_cu.device import Runnable
from runtime.kernels_cu.peer_comm import LARGE, ONE, TWO, Large, PeerComm, PeerMemory, Thresholds, region_of
from runtime.kernels_cu.recorder import Recorder

# A captured collective leaves an event-record node, its graph a wait; without peer access its proxy may add host nodes.
NCCL_NODES = ALLOWED | {"wait", "record", "host"}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WARM = (1, 16, 128, 1024)  # rows of the first collectives
OPS_PER_GRAPH, LAUNCHES = 20, 5


class Host(Protocol):
    """How ranks reach each other before their devices do."""

    rank: int
    world: int

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, equally many of each, in rank order."""


class NcclGroup:
    """NCCL's communicator of this process; its collectives may be captured."""

    def __init__(self, host: Host) -> None:
        os.environ.update(NCCL_NVLS_ENABLE="0", NVSHMEM_DISABLE_NVLS="1")
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # connects all algorithms now, none in a capture
        from cupy.cuda import nccl

        self._nccl, self._rank = nccl, host.rank
        mine = nccl.get_unique_id() if host.rank == 0 else bytes(128)
        self._comm = nccl.NcclCommunicator(host.world, host.gather_bytes(mine)[0], host.rank)

    def all_reduce(self, address: int, count: int) -> Runnable:
        """Sums are NCCL's: bf16 at every hop, one order for all ranks, not the rank order."""
        args = (address, address, count, self._nccl.NCCL_BFLOAT16, self._nccl.NCCL_SUM)
        return _NcclCall(self._comm.allReduce, args, f"nccl all_reduce of {2 * count} bytes")

    def all_gather(self, source: int, to: int, nbytes: int) -> Runnable:
        return _NcclCall(self._comm.allGather, (source, to, nbytes, self._nccl.NCCL_UINT8), f"nccl all_gather of {nbytes} bytes")

    def send(self, address: int, nbytes: int) -> Runnable:
        """To the next rank, which receives as much."""
        args = (address, nbytes, self._nccl.NCCL_UINT8, self._rank + 1)
        return _NcclCall(self._comm.send, args, f"nccl send of {nbytes} bytes")

    def receive(self, address: int, nbytes: int) -> Runnable:
        """From the rank before."""
        args = (address, nbytes, self._nccl.NCCL_UINT8, self._rank - 1)
        return _NcclCall(self._comm.recv, args, f"nccl receive of {nbytes} bytes")

    def failure(self) -> str | None:
        """NCCL's asynchronous error, if it has one."""
        try:
            self._comm.check_async_error()
        except self._nccl.NcclError as error:
            return f"NCCL: {error}"
        return None


@dataclass(frozen=True, slots=True)
class _NcclCall:
    call: Any
    arguments: tuple[Any, ...]
    name: str

    def run(self, stream: int) -> None:
        self.call(*self.arguments, stream)

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class _Opened:
    """Owns a rank's region and its views of the others'."""

    regions: list[int]
    rank: int
    told: MappedMemory
    state: int


def open_memory(recorder: Recorder, host: Host, hidden: int, config: all_reduce.Config | None = None) -> PeerMemory | None:
    """Every rank's region for rows of `hidden` numbers; None on all ranks if any of them can not reach a peer."""
    import cupy

    runtime, device = cupy.cuda.runtime, recorder.device
    config = config or all_reduce.candidates(host.world, hidden, device.sms, device.arch)[0]
    config.check(hidden)
    drawing = sample_ranks.default_config(host.world, device.sms)
    (behind, nbytes), index = region_of(config, drawing, hidden), int(runtime.getDevice())
    peers = [struct.unpack("q", part)[0] for part in host.gather_bytes(struct.pack("q", index))]
    able = len(set(peers)) == host.world and all(peer == index or runtime.deviceCanAccessPeer(index, peer) for peer in peers)
    if not _all_agree(host, able):
        return None
    region = int(runtime.malloc(nbytes))  # of its own allocation: a handle names the whole of it
    runtime.memset(region, 0, nbytes)
    runtime.deviceSynchronize()
    handles = host.gather_bytes(bytes(runtime.ipcGetMemHandle(region)))
    regions = []
    try:
        for rank, handle in enumerate(handles):
            own = rank == host.rank
            regions.append(region if own else int(runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)))
    except runtime.CUDARuntimeError:  # such as containers that share no IPC namespace
        pass
    # compiled before anybody waits for a rank's first launch
    device.functions(all_reduce.SOURCE, config.defines(hidden), all_reduce.ENTRIES)
    for module in (sample_ranks, gather_ranks):
        device.functions(module.SOURCE, drawing.defines(), module.ENTRIES)
    if not _all_agree(host, len(regions) == host.world):
        return None
    told, state, notes = MappedMemory(4), device.alloc(config.state_bytes()), device.alloc(drawing.state_bytes())
    device.synchronize()
    ranks = all_reduce.Ranks(host.rank, regions, state, told.address)
    seat = sample_ranks.Seat(drawing, all_reduce.Ranks(host.rank, [region + behind for region in regions], notes, told.address))
    return PeerMemory(config, ranks, hidden, _Opened(regions, host.rank, told, state), seat)


def open_peers(recorder: Recorder, host: Host, hidden: int) -> PeerComm:
    """This rank's collectives, the thresholds measured. All ranks call it at the same time."""
    nccl, device = NcclGroup(host), recorder.device
    room = device.alloc(2 * hidden * WARM[-1] * host.world)
    for rows in WARM:  # what a size needs is set up at its first call, which may not be a captured one
        nbytes = 2 * hidden * rows
        nccl.all_reduce(room, hidden * rows).run(device.stream)
        nccl.all_gather(room + nbytes * host.rank, room, nbytes).run(device.stream)
    device.synchronize()
    device.free(room)
    memory = open_memory(recorder, host, hidden)
    thresholds = choose(time_ways(recorder, host, nccl, memory)) if memory else None
    comm = PeerComm(recorder, host.rank, host.world, nccl, memory, thresholds)
    told = None if memory is None else (ctypes.c_uint32).from_address(memory.keep.told.host_address)

    def failure() -> str | None:
        if told is not None and told.value:
            return f"rank {told.value - 1} did not come to an exchange on the device"
        return nccl.failure()

    comm.failure = failure
    return comm


def open_line(recorder: Recorder, column: Host, hidden: int) -> NcclGroup:
    """This rank's connections to those of its number in the stages before and after; all ranks call it at the same time."""
    group, device = NcclGroup(column), recorder.device
    room = device.alloc(2 * hidden * WARM[-1])
    for rows in WARM:  # a connection is made by the first call, which may not be a captured one
        if column.rank:
            group.receive(room, 2 * hidden * rows).run(device.stream)
        if column.rank + 1 < column.world:
            group.send(room, 2 * hidden * rows).run(device.stream)
    device.synchronize()
    device.free(room)
    return group


def time_ways(
    recorder: Recorder, host: Host, large: Large, memory: PeerMemory, rows: Sequence[int] = ROWS, norm: bool = False
) -> dict[int, dict[str, float]]:
    """Microseconds of a sum of that many rows by each way, the slowest rank's, in graphs of 20. norm: residual and norm as well."""
    device, hidden = recorder.device, memory.hidden
    part, x, out = (device.alloc(2 * max(rows) * hidden) for _ in range(3))
    w = device.alloc(2 * hidden)
    then = all_reduce.Norm(x, w, out, 1e-5) if norm else None
    found: dict[int, dict[str, float]] = {}
    for count in rows:
        found[count] = {}
        for way, most in ((ONE, memory.config.blocks), (TWO, memory.config.rows), (LARGE, 1 << 30)):
            if count > most or (way == LARGE and norm):
                continue
            run = large.all_reduce(part, count * hidden) if way == LARGE else memory.shot(device, way, count, part, then)
            found[count][way] = _slowest(host, time_us(device.stream, run))
    for address in (part, x, out, w):
        device.free(address)
    return found


def time_us(stream: int, run: Runnable) -> float:
    """Microseconds of one run in a graph of 20, the mean over five launches after one more, and one without a graph before."""
    run.run(stream)
    graph, interval = CapturedGraph(stream, [run] * OPS_PER_GRAPH, NCCL_NODES), Interval(stream)
    graph.launch()
    interval.begin()
    for _ in range(LAUNCHES):
        graph.launch()
    return interval.end_us() / (LAUNCHES * OPS_PER_GRAPH)


def choose(times: Mapping[int, Mapping[str, float]]) -> Thresholds:
    """The most rows up to which one_shot is the fastest, and up to which it or two_shot is faster than large messages' way."""
    one = two = 0
    one_leads = two_leads = True
    for rows, by_way in sorted(times.items()):
        best = min(by_way, key=lambda way: by_way[way])
        one_leads, two_leads = one_leads and best == ONE, two_leads and best != LARGE
        one, two = rows if one_leads else one, rows if two_leads else two
    return Thresholds(one, two)


def _all_agree(host: Host, able: bool) -> bool:
    return all(part == b"\1" for part in host.gather_bytes(bytes([able])))


def _slowest(host: Host, us: float) -> float:
    return max(float(struct.unpack("d", part)[0]) for part in host.gather_bytes(struct.pack("d", us)))
