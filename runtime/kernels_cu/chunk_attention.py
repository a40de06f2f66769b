"""Attention of long chunks in the un-absorbed form on a GPU: arguments, scratch arrays and calls.

    split_chunks (once a step, all layers) -> chunk_expand, chunk_attention (each layer)

Grids are fixed for a bucket; which rows are taken, and with them all work, is found on the device. Where none is, both kernels of a
layer end at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from runtime.chunks import TILE, ChunkShape
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call
from runtime.kernels_cu._tensor_map import tensor_map

ARCH = "sm_90a"
PLAN, EXPAND, ATTEND = "chunk_plan.cu", "chunk_expand.cu", "chunk_attention.cu"
LATENT, ROPE, NOPE, VALUE = BUILT_FOR = 512, 64, 128, 128
THREADS, PLAN_THREADS, MOST_SEQUENCES = 384, 256, 1024
EXPAND_SMEM_BYTES = 14 * 16384 + 128  # a tile's latents, six boxes of weights, barriers
ATTEND_SMEM_BYTES = 13 * 16384 + 128  # queries, two places for keys and two for values, barriers
LEAST_BOX = 16  # keys of a page that one copy takes
RATE = 0.9  # of what a large product reaches, an estimate until a record exists
Describe = Callable[[int, int, int, int, int], Any]


def room_for(shape: ChunkShape, arch: str) -> int:
    """Keys that a step of that shape gets room for; 0 where no kernel takes it, or no chunk in it can be long enough to pay."""
    built = (shape.latent, shape.rope, shape.nope, shape.value) == BUILT_FOR and gcd(shape.page_size, TILE) >= LEAST_BOX
    return shape.room if arch == ARCH and built and shape.rows >= shape.least else 0


class PlanParams(ctypes.Structure):
    """`Params` of chunk_plan.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("seq", "pos", "ctx", "row0", "rest", "keys", "rows", "counts")),
        *((name, ctypes.c_int) for name in ("M", "sequences", "least", "room")),
    ]  # fmt: skip


class ExpandParams(ctypes.Structure):
    """`Params` of chunk_expand.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "keys", "counts", "k", "v")),
        *((name, ctypes.c_int) for name in ("page_size", "pages_each", "box_keys", "heads", "room")),
    ]  # fmt: skip


class AttendParams(ctypes.Structure):
    """`Params` of chunk_attention.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "rows", "counts", "value", "part", "stats", "arrived")),
        *((name, ctypes.c_int) for name in ("page_size", "pages_each", "box_keys", "heads", "room")),
        ("scale_log2", ctypes.c_float),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dims:
    """A bucket: M rows, heads of this rank, S cache rows, page_size and pages_each of a sequence; room: keys in the workspace, a
    multiple of 128."""

    M: int
    heads: int
    S: int
    page_size: int
    pages_each: int
    room: int

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernels cannot take."""
        if gcd(self.page_size, TILE) < LEAST_BOX:
            raise ValueError(f"chunk_attention: tensor copies need page_size = {self.page_size} to be a multiple of {LEAST_BOX}")
        if self.room < TILE or self.room % TILE or self.heads * self.room > 1 << 31:
            raise ValueError(f"chunk_attention: room for {self.room} keys of {self.heads} heads; whole tiles of {TILE}, below 2**31 rows")
        if self.M < 1 or self.heads < 1:
            raise ValueError(f"chunk_attention: M = {self.M}, heads = {self.heads}; each is at least 1")

    @property
    def box_keys(self) -> int:
        """Keys that one copy takes from a page."""
        return gcd(self.page_size, TILE)


@dataclass(frozen=True, slots=True)
class Config:
    """ping_pong: the two groups of a block take turns at the tensor cores; else they go on their own."""

    ping_pong: bool = True

    def defines(self) -> dict[str, int]:
        """What chunk_attention.cu is built with."""
        return {"PING_PONG": int(self.ping_pong)}


def list_bytes(m: int, least: int, room: int) -> dict[str, int]:
    """Bytes of a step's lists: key tiles, row tiles, their numbers."""
    return {"keys": 16 * (room // TILE), "rows": 32 * (m // TILE + m // least + 1), "counts": 16}


def workspace_bytes(heads: int, room: int, blocks: int) -> dict[str, int]:
    """Bytes of each scratch array that layers and buckets share. `arrived` must be zero before the first call."""
    wide = 2 * heads * room
    return {"k": wide * NOPE, "v": wide * VALUE, "part": blocks << 16, "stats": blocks << 12, "arrived": 8 * blocks}


def plan_call(rows: int, sequences: int, least: int, room: int, at: Mapping[str, int]) -> Call:
    """Chooses the rows and lists their work: once a step. least: rows of a chunk that is taken; room: keys. at: seq, pos, ctx, row0,
    rest, and `list_bytes` by name."""
    if not 1 <= sequences <= MOST_SEQUENCES or not 1 <= rows < 1 << 20:
        raise ValueError(f"split_chunks: B = {sequences}, M = {rows}; 1 to {MOST_SEQUENCES} sequences, 1 to {(1 << 20) - 1} rows")
    if least < 1 or room < TILE or room % TILE:
        raise ValueError(f"split_chunks: least = {least}, room = {room}; a row or more, whole tiles of {TILE} keys")
    pointers = (at[name] for name in ("seq", "pos", "ctx", "row0", "rest", "keys", "rows", "counts"))
    return Call("split_chunks", (1, 1, 1), PLAN_THREADS, 0, (PlanParams(*pointers, rows, sequences, least, room // TILE),))


def expand_call(d: Dims, blocks: int, at: Mapping[str, int], describe: Describe | None = None) -> Call:
    """One layer's keys and values of all taken sequences. at: pages, cache, w_uk, w_uv, lists and workspace. describe: makes the copy
    engine's descriptions; None: the driver."""
    d.check()
    describe = describe or tensor_map
    pointers = (at[name] for name in ("pages", "keys", "counts", "k", "v"))
    params = ExpandParams(*pointers, d.page_size, d.pages_each, d.box_keys, d.heads, d.room)
    maps = (
        describe(at["cache"], d.S, LATENT + ROPE, 2 * (LATENT + ROPE), d.box_keys),
        describe(at["w_uk"], d.heads * LATENT, NOPE, 2 * NOPE, 64),
        describe(at["w_uv"], d.heads * VALUE, LATENT, 2 * LATENT, VALUE),
    )
    return Call("chunk_expand", (blocks, 1, 1), THREADS, EXPAND_SMEM_BYTES, (params, *maps))


def attend_call(d: Dims, blocks: int, at: Mapping[str, int], scale: float, describe: Describe | None = None) -> Call:
    """One layer's attention of the taken rows, from what `expand_call` left. at: q, absorbed, cache, pages, value, lists, workspace."""
    d.check()
    describe = describe or tensor_map
    pointers = (at[name] for name in ("pages", "rows", "counts", "value", "part", "stats", "arrived"))
    params = AttendParams(*pointers, d.page_size, d.pages_each, d.box_keys, d.heads, d.room, scale * 1.4426950408889634)
    query, absorbed = d.heads * (NOPE + ROPE), d.heads * (LATENT + ROPE)
    maps = (
        describe(at["q"], d.M, query, 2 * query, TILE),
        describe(at["absorbed"], d.M, absorbed, 2 * absorbed, TILE),
        describe(at["cache"], d.S, LATENT + ROPE, 2 * (LATENT + ROPE), d.box_keys),
        describe(at["k"], d.heads * d.room, NOPE, 2 * NOPE, TILE),
        describe(at["v"], d.heads * d.room, VALUE, 2 * VALUE, TILE),
    )
    return Call("chunk_attention", (blocks, 1, 1), THREADS, ATTEND_SMEM_BYTES, (params, *maps))


def predict_us(heads: int, rows: int, ctx: int, hw: Hardware) -> tuple[float, float]:
    """Expansion and attention of one chunk behind ctx keys, at RATE of the machine's rate."""
    keys = -(-(ctx + rows) // TILE) * TILE
    expand = 2.0 * keys * heads * LATENT * (NOPE + VALUE)
    attend = 2.0 * rows * (ctx + (rows + TILE) / 2) * heads * (NOPE + ROPE + VALUE)
    return expand / (RATE * hw.tensor_flops) * 1e6, attend / (RATE * hw.tensor_flops) * 1e6
