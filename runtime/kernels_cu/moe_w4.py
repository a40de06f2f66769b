"""The INT4 mixture of experts: the launches of one layer, their arguments and scratch arrays.

    [moe_route_sort | moe_sort] -> [moe_pack, with wgmma] -> moe_w4 -> moe_combine

Grids are fixed for a bucket; how many experts and rows there are is read from device memory. Dead rows have expert -1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.kernels_cu._build import build
from runtime.kernels_cu._call import Call, blocks, f32, i32, ptr
from runtime.kernels_cu._launch import Function, Launch, load
from runtime.kernels_cu.moe_config import Config, Dims

SOURCE, ENTRIES = "moe_w4.cu", ("moe_w4", "moe_combine", "moe_pack")
ROUTE_SOURCE, ROUTE_ENTRIES = "moe_route.cu", ("moe_sort", "moe_route_sort")
SORT_THREADS = 512
ALONE_TOKENS = 16  # what one block routes, a warp a token, without waiting for others
ROUTE_TOKENS = 4  # a block of several: one warp a scheduler, which issue alone bounds


class Phase(ctypes.Structure):
    """`Phase` of moe_w4.cu."""

    _fields_ = [
        ("w", ctypes.c_void_p), ("in_", ctypes.c_void_p), ("strips", ctypes.c_int), ("groups", ctypes.c_int),
        ("wn", ctypes.c_int), ("wk", ctypes.c_int), ("splits", ctypes.c_int), ("batch", ctypes.c_int),
        ("shift", ctypes.c_uint32), ("factor", ctypes.c_float),
    ]  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of moe_w4.cu."""

    _fields_ = [
        ("phase", Phase * 2), ("hidden", ctypes.c_void_p), ("part", ctypes.c_void_p), ("chunks", ctypes.c_void_p),
        ("total", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("claim", ctypes.c_void_p),
        ("ready", ctypes.c_void_p), ("halves", ctypes.c_void_p), ("halves_done", ctypes.c_void_p),
        ("top_k", ctypes.c_int), ("hidden_row", ctypes.c_int), ("part_row", ctypes.c_int),
        ("choices", ctypes.c_int), ("most_chunks", ctypes.c_int), ("stage_bytes", ctypes.c_int), ("stages_at", ctypes.c_int),
    ]  # fmt: skip


class Sorted(ctypes.Structure):
    """`Sorted` of moe_route.cu."""

    _fields_ = [
        ("chunks", ctypes.c_void_p), ("total", ctypes.c_void_p), ("rows", ctypes.c_void_p),
        ("octets", ctypes.c_void_p), ("claim", ctypes.c_void_p), ("ready", ctypes.c_void_p), ("arrived", ctypes.c_void_p),
        ("chunk_rows", ctypes.c_int),
    ]  # fmt: skip


def scale_shift(exponent: int) -> int:
    """`prim::scale_shift`: what is added to a packed scale pair."""
    return (129 - exponent) << 23 | (133 - exponent) << 7


def workspace_bytes(dims: Dims, config: Config) -> dict[str, int]:
    """Bytes of each scratch array of a layer, by field name. arrived and halves_done must be zero before the first call."""
    choices = dims.M * dims.top_k
    chunks = most_chunks(dims, config)
    rows = 8 * most_octets(dims)
    return {
        "chunks": 16 * chunks, "ready": 4 * chunks, "rows": 8 * rows, "total": 4, "octets": 4, "claim": 4,
        "arrived": 4, "hidden": 2 * rows * dims.F, "part": (4 if config.float_parts else 2) * config.splits * choices * dims.H,
        "halves": 2048 * config.octets * chunks * dims.strips[0] * config.splits13 if config.splits13 > 1 else 16,
        "halves_done": 4 * chunks * dims.strips[0],
        "packed": 2 * rows * dims.H if config.wgmma else 16,
    }  # fmt: skip


def most_chunks(dims: Dims, config: Config) -> int:
    """Chunks in the worst case, and one to spare."""
    choices = dims.M * dims.top_k
    return min(choices, dims.E) + choices // config.chunk_rows + 1


def most_octets(dims: Dims) -> int:
    """Octets of sorted rows, pads included, in the worst case: every expert's last octet holds one row."""
    choices = dims.M * dims.top_k
    hit = min(choices, dims.E)
    return hit + (choices - hit) // 8


def fill_params(dims: Dims, config: Config, at: Mapping[str, int], exponents: tuple[int, int]) -> tuple[Params, Sorted]:
    """The kernels' arguments. at: address by name: w13, w2, x, weight and every array of `workspace_bytes`."""
    inputs, rows = (at["packed"] if config.wgmma else at["x"], at["hidden"]), (config.rows13, config.rows2)
    phases = [
        Phase(
            w,
            inputs[i],
            dims.strips[i],
            dims.groups[i],
            rows[i],
            config.wk(i),
            config.splits if i else config.splits13,
            config.claim if i else 1,
            scale_shift(exponents[i]),
            2.0 ** exponents[i],
        )
        for i, w in enumerate((at["w13"], at["w2"]))
    ]
    params = Params(
        (Phase * 2)(*phases), at["hidden"], at["part"], at["chunks"], at["total"], at["rows"], at["claim"], at["ready"],
        at["halves"], at["halves_done"], dims.top_k, dims.F, dims.H, dims.M * dims.top_k, most_chunks(dims, config),
        config.stage_bytes(), config.stages_at(),
    )  # fmt: skip
    work = Sorted(at["chunks"], at["total"], at["rows"], at["octets"], at["claim"], at["ready"], at["arrived"], config.chunk_rows)
    return params, work


def route_defines(experts: int) -> dict[str, int]:
    """moe_route.cu's constant: scores are kept in registers, 32 experts a lane and register."""
    return {"MAX_EXPERTS": -(-experts // 128) * 128}


def check_resident(config: Config, resident: int) -> None:
    """Raises ValueError where an SM holds fewer blocks than are launched: one that waits for one not yet there would stall."""
    if resident < config.blocks:
        raise ValueError(f"{config}: only {resident} blocks an SM are resident, {config.blocks} are launched")


@dataclass(slots=True)
class Kernels:
    """The loaded functions of one configuration."""

    dims: Dims
    config: Config
    arch: str
    functions: dict[str, Function]


def build_kernels(dims: Dims, config: Config, arch: str = "sm_90a") -> Kernels:
    """Compiles and loads what `layer_launches` needs. Needs a GPU; `_build.build` alone does not."""
    config.check(dims, arch)
    functions = load(build(SOURCE, config.defines(), arch).code, ENTRIES)
    functions |= load(build(ROUTE_SOURCE, route_defines(dims.E), arch).code, ROUTE_ENTRIES)
    check_resident(config, functions["moe_w4"].blocks_per_sm(config.threads, config.smem_bytes()))
    return Kernels(dims, config, arch, functions)


def layer_calls(
    dims: Dims, config: Config, at: Mapping[str, int], exponents: tuple[int, int], sms: int, scale: float = 1.0
) -> list[tuple[str, Call]]:
    """The launches of one layer, in order, each with the source it is built from (`defines`).

    at: addresses by name as in `fill_params`, and expert, base (0: none), out; with logits (bias, live: 0 for none)
    routing is part of it, otherwise expert and weight are inputs.
    """
    params, work = fill_params(dims, config, at, exponents)
    if "logits" in at:
        tokens = (ptr(at["logits"]), ptr(at["bias"]), ptr(at["live"]), ptr(at["expert"]), ptr(at["weight"]))
        grid = (1 if dims.M <= ALONE_TOKENS else blocks(dims.M, ROUTE_TOKENS), 1, 1)
        numbers = (f32(scale), i32(dims.M), i32(dims.E), i32(dims.top_k))
        first = Call("moe_route_sort", grid, SORT_THREADS, 0, (*tokens, *numbers, work))
    else:
        arguments = (ptr(at["expert"]), ptr(at["weight"]), i32(dims.M * dims.top_k), i32(dims.E), work)
        first = Call("moe_sort", (1, 1, 1), SORT_THREADS, 0, arguments)
    main = Call("moe_w4", (sms * config.blocks, 1, 1), config.threads, config.smem_bytes(), (params,))
    slices = blocks(dims.H, 1024)  # 8 numbers a thread; of moe_pack 8 pieces, all in flight
    sums = (ptr(at["part"]), ptr(at["expert"]), ptr(at["base"]), ptr(at["out"]), i32(dims.top_k), i32(config.splits), i32(dims.H))
    last = Call("moe_combine", (slices, dims.M, 1), 128, 0, sums)
    if not config.wgmma:
        return [(ROUTE_SOURCE, first), (SOURCE, main), (SOURCE, last)]
    rows = (ptr(at["x"]), ptr(at["rows"]), ptr(at["octets"]), ptr(at["packed"]), i32(dims.top_k), i32(dims.H))
    pack = Call("moe_pack", (slices, most_octets(dims), 1), 128, 0, rows)
    return [(ROUTE_SOURCE, first), (SOURCE, pack), (SOURCE, main), (SOURCE, last)]


def layer_launches(
    kernels: Kernels, at: Mapping[str, int], exponents: tuple[int, int], sms: int, scale: float = 1.0, keep: tuple[Any, ...] = ()
) -> list[Launch]:
    """`layer_calls` on the current device."""
    calls = layer_calls(kernels.dims, kernels.config, at, exponents, sms, scale)
    return [call.launch(kernels.functions, keep) for _, call in calls]
