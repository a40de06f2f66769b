"""Attention of the drafter's blocks: the two calls of block_attention.cu.

Grids are fixed for a bucket of B streams; context lengths are read from device memory. Two launches, in stream order: a sum
for each split of the keys, then the splits put together. Dead streams have ctx -1 and write nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, blocks

SOURCE = "block_attention.cu"
ENTRIES = ("block_attention_part", "block_attention_merge")
KEYS, BARRIER_BYTES, MERGE_ROWS = 32, 128, 4  # kKeys; before the tiles; kMergeThreads / 32
MAX_SMEM_BYTES = 101_376  # the smallest of the build list: sm_89, sm_120a
_LAUNCH_US, _TILE_US = 1.5, 0.5  # estimates until a record exists


class Params(ctypes.Structure):
    """`Params` of block_attention.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_cache", "v_cache", "pages", "ctx", "part", "stats", "out")),
        *((name, ctypes.c_int) for name in ("T", "A", "Z", "P", "page_size", "splits")), ("scale", ctypes.c_float),
    ]  # fmt: skip


POINTERS = tuple(field[0] for field in Params._fields_[:10])


@dataclass(frozen=True, slots=True)
class Dims:
    """B streams of a bucket, T rows of a block, A query heads, Z kv heads, J head width, P pages of a stream, their size."""

    B: int
    T: int
    A: int
    Z: int
    J: int
    P: int
    page_size: int

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernels cannot take."""
        if self.J % 64 or not 64 <= self.J <= 256:
            raise ValueError(f"block_attention: J = {self.J}; a multiple of 64 up to 256")
        if min(self.B, self.T, self.A, self.Z, self.P, self.page_size) < 1 or self.A % self.Z:
            raise ValueError(f"{self}: every number at least 1, and A a multiple of Z")
        if self.rows > 256:
            raise ValueError(f"{self}: {self.rows} rows share a kv head, at most 256 fit a block of sixteen warps")

    @property
    def rows(self) -> int:
        """Rows that share a kv head."""
        return self.T * self.A // self.Z

    @property
    def frags(self) -> int:
        """Warps of a block: sixteen rows each."""
        return blocks(self.rows, 16)


@dataclass(frozen=True, slots=True)
class Config:
    """splits: blocks that share a stream's keys. stages: tiles of 32 keys on their way."""

    splits: int = 8
    stages: int = 3

    def check(self, dims: Dims) -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        if not 1 <= self.splits <= 256 or not 2 <= self.stages <= 4:
            raise ValueError(f"{self}: splits outside 1..256 or stages outside 2..4")
        if self.smem_bytes(dims) > MAX_SMEM_BYTES:
            raise ValueError(f"{self}: {self.smem_bytes(dims)} bytes of shared memory, {MAX_SMEM_BYTES} fit")

    def smem_bytes(self, dims: Dims) -> int:
        return BARRIER_BYTES + self.stages * 2 * KEYS * 2 * dims.J

    def defines(self, dims: Dims) -> dict[str, int]:
        return {"HEAD": dims.J, "FRAGS": dims.frags, "STAGES": self.stages}


def workspace_bytes(dims: Dims, config: Config) -> dict[str, int]:
    """Bytes of the scratch arrays; their contents are undefined before and after."""
    rows = dims.B * dims.Z * config.splits * 16 * dims.frags
    return {"part": 4 * rows * dims.J, "stats": 8 * rows}


def candidates(dims: Dims, sms: int = 132) -> list[Config]:
    """Splits that give each SM one to four blocks, fewest first."""
    base = max(1, sms // (dims.B * dims.Z))
    return [Config(splits) for splits in sorted({1, base, 2 * base, 4 * base}) if splits <= 256]


def work(dims: Dims, config: Config, ctx: float) -> Cost:
    """What this implementation moves: keys and values once, its partial sums out and in."""
    keys = 2.0 * 2.0 * dims.B * dims.Z * dims.J * (ctx + dims.T)
    parts = float(workspace_bytes(dims, config)["part"])
    return Cost(4.0 * dims.B * dims.Z * 16 * dims.frags * dims.J * (ctx + dims.T), keys + parts, parts)


def predict_us(dims: Dims, config: Config, ctx: float, hw: Hardware, sms: int = 132) -> float:
    """Two launches, and the longer of the traffic and a block's tiles one after another."""
    waves = blocks(dims.B * dims.Z * config.splits, 3 * sms)
    tiles = math.ceil((ctx + dims.T) / KEYS / config.splits)
    return 2 * _LAUNCH_US + max(work(dims, config, ctx).floor_us(hw), waves * tiles * _TILE_US)


def calls(config: Config, dims: Dims, scale: float, at: Mapping[str, int]) -> tuple[Call, Call]:
    """The two launches. at: addresses by name, POINTERS; scale: of the scores, as the op has it."""
    config.check(dims)
    sizes = (dims.T, dims.A, dims.Z, dims.P, dims.page_size, config.splits)
    params = Params(*(at[name] for name in POINTERS), *sizes, scale / math.log(2.0))
    grid = (config.splits, dims.Z, dims.B)
    part = Call(ENTRIES[0], grid, 32 * dims.frags, config.smem_bytes(dims), (params,))
    return part, Call(ENTRIES[1], (blocks(dims.rows, MERGE_ROWS), dims.Z, dims.B), 32 * MERGE_ROWS, 0, (params,))
