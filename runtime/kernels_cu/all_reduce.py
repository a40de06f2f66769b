"""The sum over ranks through peer memory, alone or with the residual add and RMS norm after it: the calls of all_reduce.cu.

GPU-unverified as it stands: run on the CPU shim by two to five processes, compiled for every architecture. Before one_shot could rehearse
its code it ran on two H200 (tools/results/allreduce_h200x2.jsonl).

Each rank owns a region that the others write into, and a state of its own; both start as zeros. All ranks must make the same
calls in the same order with the same config.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, vectors

SOURCE = "all_reduce.cu"
ENTRIES = ("all_reduce_one", "all_reduce_one_norm", "all_reduce_two", "all_reduce_two_norm")
MAX_WORLD = 8
SPINS = 20_000_000  # polls of a wait, some 0.7 us each: longer than any rank is late, a host's hiccup included
_ONE_WAY_US = 1.34  # flag over NVLink, two H200


@dataclass(frozen=True, slots=True)
class Config:
    """threads of a block, vecs: 16-byte vectors of a row that each holds, blocks: the largest grid, rows: the most that two_shot takes.

    All blocks of a grid must be resident at once: blocks is at most the number of multiprocessors. clusters: blocks may share
    a row that is normed (sm_90). parts: how many share a row in one_shot, 0: by the table. rehearsals: how often one_shot runs through
    its code while the kernel before runs, so that its instructions are there: none until that is measured.
    """

    world: int
    threads: int = 448
    vecs: int = 2
    blocks: int = 128
    rows: int = 1024
    clusters: bool = False
    parts: int = 0
    rehearsals: int = 0

    def check(self, hidden: int) -> None:
        """Raises ValueError with the broken rule."""
        row = vectors("all_reduce", "H", hidden)
        if not 2 <= self.world <= MAX_WORLD:
            raise ValueError(f"{self}: {self.world} ranks; 2 to {MAX_WORLD} share a host")
        if self.threads % 32 or not 32 <= self.threads <= 1024 or self.vecs < 1:
            raise ValueError(f"{self}: {self.threads} threads of {self.vecs} vectors; whole warps, at most 1024")
        if self.threads * self.vecs < row:
            raise ValueError(f"{self}: room for {self.threads * self.vecs} vectors, a row of H = {hidden} has {row}")
        if (self.parts and row % (32 * self.parts)) or not 0 <= self.parts <= 8:
            raise ValueError(f"{self}: {self.parts} blocks share {row} vectors; at most 8, each of whole warps' vectors")
        if self.blocks < 2 or self.blocks % 2 or self.rows < 1:
            raise ValueError(f"{self}: {self.blocks} blocks, {self.rows} rows; an even number of blocks, at least one row")

    def defines(self, hidden: int) -> dict[str, int]:
        return {
            "WORLD": self.world,
            "BLOCKS": self.blocks,
            "ROWS": self.rows,
            "ROW_VECTORS": vectors("all_reduce", "H", hidden),
            "THREADS": self.threads,
            "VECS": self.vecs,
        }

    def region_bytes(self, hidden: int) -> int:
        """Of one rank: packets of 16 bytes by parity, sender and unit; flags; rows to be summed by sender; sums."""
        row = vectors("all_reduce", "H", hidden)
        packets, flags = 2 * self.world * self.blocks * 64 * -(-row // 32) * 16, 2 * self.blocks * self.world * 4
        return packets + flags + (self.world + 1) * self.rows * row * 16

    def state_bytes(self) -> int:
        return 4 * (2 * self.blocks + 1)


def has_clusters(arch: str) -> bool:
    """Whether blocks of that architecture (sm_90a) reach each other's shared memory."""
    return int(arch.removeprefix("sm_").rstrip("a") or 0) >= 90


def candidates(world: int, hidden: int, sms: int, arch: str = "") -> list[Config]:
    """The default first. arch: the device's, as NVRTC names it.

    Above 4 ranks a vector's packets of all peers want more registers than 448 threads have (128 each).
    """
    row = vectors("all_reduce", "H", hidden)
    found = []
    for vecs in (1, 2, 4):
        threads = 32 * -(-row // (32 * vecs))
        if threads <= (896 if world <= 4 else 256):
            found.append(Config(world, threads, vecs, blocks=min(128, sms // 2 * 2), clusters=has_clusters(arch)))
    if not found:
        raise ValueError(f"all_reduce: a row of H = {hidden} has {row} vectors; blocks of {world} ranks hold at most 1024")
    return found


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a rank finds the others: every rank's region as this process sees it, its own included; its state; the host's word.

    told: address of 4 bytes of host memory that the device can write: 0, or 1 + the rank that did not come.
    """

    rank: int
    regions: Sequence[int]
    state: int
    told: int
    spins: int = SPINS


class _Group(ctypes.Structure):
    _fields_ = [
        ("of", ctypes.c_void_p * MAX_WORLD),
        ("state", ctypes.c_void_p),
        ("told", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("spins", ctypes.c_int),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("part", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("seq", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("rehearsals", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class Norm:
    """What follows the sum: x [M, H] += sum, out [M, H] = x rsqrt(mean x^2 + eps) w."""

    x: int
    w: int
    out: int
    eps: float


def one_shot(config: Config, m: int, hidden: int, ranks: Ranks, *, part: int, norm: Norm | None = None, seq: int = 0) -> Call:
    """part [M, H] bf16 becomes the sum, or goes into `norm`; at most config.blocks rows. For messages of some 100 KiB."""
    if not 1 <= m <= config.blocks:
        raise ValueError(f"all_reduce: one_shot of {m} rows; 1 to {config.blocks} fit")
    parts = _pieces(config, m, hidden) if norm is None or config.clusters else 1
    threads = 32 * -(-(vectors("all_reduce", "H", hidden) // parts) // (32 * config.vecs))
    return _call("all_reduce_one", config, (m * parts, 1, 1), threads, m, hidden, ranks, part, norm, seq, parts)


def two_shot(config: Config, m: int, hidden: int, ranks: Ranks, *, part: int, norm: Norm | None = None, seq: int = 0) -> Call:
    """The same for larger messages, at most config.rows rows."""
    if not 1 <= m <= config.rows:
        raise ValueError(f"all_reduce: two_shot of {m} rows; 1 to {config.rows} fit")
    return _call("all_reduce_two", config, (min(m, config.blocks), 1, 1), config.threads, m, hidden, ranks, part, norm, seq, 1)


def _pieces(config: Config, m: int, hidden: int) -> int:
    """Blocks that share a row: config.parts, or up to 8, of whole warps' vectors, as long as the grid holds them."""
    row = vectors("all_reduce", "H", hidden)
    if config.parts:
        if m * config.parts > config.blocks:
            raise ValueError(f"all_reduce: {m} rows of {config.parts} blocks; {config.blocks} fit")
        return config.parts
    return next((n for n in (8, 4, 2) if row % (32 * n) == 0 and m * n <= config.blocks), 1)


def _call(
    entry: str,
    config: Config,
    grid: tuple[int, int, int],
    threads: int,
    m: int,
    hidden: int,
    ranks: Ranks,
    part: int,
    norm: Norm | None,
    seq: int,
    parts: int,
) -> Call:
    config.check(hidden)
    group = seat_of("all_reduce", ranks, config.world)
    then = norm or Norm(0, 0, 0, 0.0)
    rows = _Rows(part, then.x, then.w, seq, then.out, m, parts, config.rehearsals, then.eps)
    return Call(f"{entry}_norm" if norm else entry, grid, threads, 0, (group, rows), cluster=parts if norm else 1)


def seat_of(kernel: str, ranks: Ranks, world: int) -> ctypes.Structure:
    """A kernel's argument: `Group` of all_reduce.cu, `Seat` of sample_ranks.cu. ValueError if it was built for another world."""
    if len(ranks.regions) != world or not 0 <= ranks.rank < world:
        raise ValueError(f"{kernel}: rank {ranks.rank} with {len(ranks.regions)} regions, built for {world}")
    return _Group((ctypes.c_void_p * MAX_WORLD)(*ranks.regions), ranks.state, ranks.told, ranks.rank, ranks.spins)


def work(world: int, m: int, hidden: int, two: bool) -> Cost:
    """What a rank sends (as write) and reads of its own memory."""
    message = 2.0 * m * hidden
    sent = 2 * message * (world - 1) / world if two else 2 * message * (world - 1)
    return Cost((world - 1.0) * m * hidden, sent + message, sent + message)


def predict_us(world: int, m: int, hidden: int, two: bool, hw: Hardware) -> float:
    """Launch and latency of one or two meetings, then the link."""
    sent = work(world, m, hidden, two).write_bytes - 2.0 * m * hidden
    return 1.5 + (2 if two else 1) * _ONE_WAY_US + sent / hw.link_bps * 1e6
