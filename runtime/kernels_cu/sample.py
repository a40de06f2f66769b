"""Sampling: the launch of sample.cu, its arguments and constants.

The grid has a block for each output row of the bucket; how many are live, and how long the adjustment tables are, is read
from device memory, so one launch serves every step of a graph. Rows beyond the live ones, and rows of a dead sequence
(seq -1), write nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call
from runtime.types import I32

SOURCE = "sample.cu"
ENTRIES = ("sample",)
ROOM_BYTES = 33_064  # sizeof(Shared) of sample.cu; the shim's test holds them to each other
MOST_IDS = 1 << 21
MOST_TOP = 2048  # kListRoom of prim/select.cuh
MAX_SMEM_BYTES = 101_376  # the smallest of the build list: sm_89, sm_120a
_PASS_BPS = 1.0e11  # what one SM draws from L2; an estimate until a record exists


class Params(ctypes.Structure):
    """`Params` of sample.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "logits", "out_rows", "seq", "pos", "temperature", "top_p", "min_p", "top_k", "seed", "logprobs",
            "adjust_seq", "adjust_seq_by", "adjust_row", "adjust_row_by", "mask_rows", "masks",
            "live", "live_seq", "live_row", "live_masks",
            "target", "logp", "finite", "top_ids", "top_logp",
        )),
        ("V", ctypes.c_int), ("K", ctypes.c_int), ("words", ctypes.c_int),
    ]  # fmt: skip


POINTERS = tuple(field[0] for field in Params._fields_[:-3])


@dataclass(frozen=True, slots=True)
class Dims:
    """I: output rows of the bucket, V: vocabulary, K: alternatives for which top_ids has room (0: none)."""

    I: int  # noqa: E741 (the letter of the vocabulary)
    V: int
    K: int

    @property
    def words(self) -> int:
        """32-bit words of a token mask."""
        return -(-self.V // 32)

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernel cannot take."""
        if self.I < 1:
            raise ValueError(f"sample: I = {self.I}; a bucket has at least one output row")
        if not 1 <= self.V <= MOST_IDS:
            raise ValueError(f"sample: V = {self.V} is outside 1..{MOST_IDS}")
        if not 0 <= self.K <= min(self.V, MOST_TOP):
            raise ValueError(f"sample: K = {self.K} is outside 0..{min(self.V, MOST_TOP)}")


@dataclass(frozen=True, slots=True)
class Config:
    """threads: of a block, one block a row. 1,024 spill on sm_80 to sm_90a, 512 take 94 to 107 registers."""

    threads: int = 512

    def check(self, dims: Dims) -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        if self.threads % 32 or not 32 <= self.threads <= 1024 or 2048 % self.threads:
            raise ValueError(f"sample: {self.threads} threads; whole warps that divide 2048 bins, at most 1024")
        if self.smem_bytes(dims) > MAX_SMEM_BYTES:
            raise ValueError(f"sample: V = {dims.V} needs {self.smem_bytes(dims)} bytes of shared memory, {MAX_SMEM_BYTES} fit")

    def smem_bytes(self, dims: Dims) -> int:
        """Bins and list, then two bit maps of the vocabulary."""
        return ROOM_BYTES + 2 * 4 * dims.words

    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads}


def candidates(dims: Dims) -> list[Config]:
    """Legal configurations, the default first."""
    return [Config(threads) for threads in (512, 256) if Config(threads).smem_bytes(dims) <= MAX_SMEM_BYTES]


def work(dims: Dims, passes: int) -> Cost:
    """What this kernel reads: the row once for each pass.

    1 pass for argmax, 2 for a plain draw, 7 with every filter; 1 more with adjustments or a mask, 1 for logp, 3 for top_ids.
    """
    return Cost(20.0 * dims.I * dims.V * passes, 4.0 * dims.I * dims.V * passes, 9.0 * dims.I)


def predict_us(dims: Dims, passes: int, hw: Hardware, sms: int = 132) -> float:
    """The longer of: one row through one SM as often as blocks queue there; the first pass from memory."""
    rounds = -(-dims.I // sms)
    return 1e6 * max(rounds * passes * 4.0 * dims.V / _PASS_BPS, 4.0 * dims.I * dims.V / hw.read_bps)


def check_tables(adjust_seq: I32, adjust_row: I32, mask_rows: I32) -> None:
    """Raises ValueError unless the tables rise by their first column, which the kernel's binary search needs.

    `runtime.adjust` and `runtime.masks` make them so; the plan that goes to a device is checked once, on the host.
    """
    for name, table in (("adjust_seq", adjust_seq), ("adjust_row", adjust_row), ("mask_rows", mask_rows[:, None])):
        if len(table) < 2:
            continue
        falls = np.flatnonzero(table[1:, 0] < table[:-1, 0])
        if len(falls):
            at = int(falls[0])
            raise ValueError(f"{name}: entry {at + 1} is of {table[at + 1, 0]}, entry {at} of {table[at, 0]}; sort by the first column")


def fill_params(dims: Dims, at: Mapping[str, int]) -> Params:
    """The kernel's arguments from addresses by name: POINTERS."""
    return Params(*(at[name] for name in POINTERS), dims.V, dims.K, dims.words)


def call(dims: Dims, config: Config, at: Mapping[str, int]) -> Call:
    """One launch for all rows of a bucket."""
    config.check(dims)
    return Call("sample", (dims.I, 1, 1), config.threads, config.smem_bytes(dims), (fill_params(dims, at),))
