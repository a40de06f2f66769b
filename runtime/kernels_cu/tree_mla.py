"""Attention over the latent cache on a GPU: arguments, scratch arrays and launches.

    tree_mla_plan (once a step, all layers) -> tree_mla (each layer)

Grids are fixed for a bucket; lengths, rows and splits are found on the device. Dead rows have sequence -1 and are not written.
`slot` and `pos` of the op are not read: node j of a sequence lies at position ctx + j of its pages, which is the plan's rule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from runtime.kernels_cu._build import build
from runtime.kernels_cu._call import Call
from runtime.kernels_cu._launch import Function, Launch, load
from runtime.kernels_cu._tensor_map import tensor_map
from runtime.kernels_cu.tree_mla_config import TILE, VALUE, WIDTH, Config, Dims, most_tiles, slot_room

ENTRIES = ("tree_mla_plan", "tree_mla")
MERGE = "tree_mla_merge"  # an entry of builds with MERGE_LATER
MERGE_THREADS, MERGE_SMEM = 256, 49 << 10  # it uses 7 KB, but asks for tree_mla's division of an SM's memory: the two stand side by side


class Params(ctypes.Structure):
    """`Params` of prim/mla_items.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "cache", "pages", "ancestors", "out", "items", "count", "part", "stats", "arrived")),
        *((name, ctypes.c_int) for name in ("page_size", "pages_each", "words", "last_column", "box_keys")),
        ("scale_log2", ctypes.c_float),
    ]  # fmt: skip


class PlanParams(ctypes.Structure):
    """`PlanParams` of prim/mla_items.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ctx", "row0", "seq", "items", "count")),
        *((name, ctypes.c_int) for name in ("rows", "sequences", "blocks", "chunk", "item_room", "slot_room")),
    ]  # fmt: skip


def workspace_bytes(dims: Dims, config: Config, blocks: int) -> dict[str, int]:
    """Bytes of each scratch array of a bucket, by field name; layers share them. `arrived` must be zero before the first call."""
    tiles, room = most_tiles(dims, config), slot_room(dims, config, blocks)
    return {
        "items": 48 * max(tiles + room, blocks),
        "count": 4,
        "part": room * config.columns * VALUE * (4 if config.float_parts else 2),
        "stats": room * config.columns * 8,
        "arrived": 4 * tiles,
    }


def fill_params(dims: Dims, config: Config, at: Mapping[str, int], scale: float, blocks: int) -> tuple[PlanParams, Params]:
    """The kernels' arguments. at: address by name: q, cache, pages, ancestors, out, ctx, row0, seq and `workspace_bytes`."""
    tiles, room = most_tiles(dims, config), slot_room(dims, config, blocks)
    plan = PlanParams(
        at["ctx"], at["row0"], at["seq"], at["items"], at["count"], dims.M, dims.B, blocks, config.chunk, tiles + room, room
    )  # fmt: skip
    names = ("q", "cache", "pages", "ancestors", "out", "items", "count", "part", "stats", "arrived")
    box = gcd(dims.page_size, TILE)
    params = Params(
        *(at[name] for name in names), dims.page_size, dims.pages_each, dims.words, dims.M * dims.heads - 1, box, scale * 1.4426950408889634
    )  # fmt: skip
    return plan, params


def merges_later(config: Config) -> bool:
    """Whether a layer is two launches."""
    return bool(dict(config.trials).get("MERGE_LATER"))


def entries(config: Config) -> tuple[str, ...]:
    """The functions of a build."""
    return (*ENTRIES, MERGE) if merges_later(config) else ENTRIES


def check_resident(config: Config, resident: int) -> None:
    """Raises ValueError where no block fits an SM. Blocks wait for one another's partials: all, one an SM, must run at once."""
    if resident < 1:
        raise ValueError(f"{config}: a block of {config.threads} threads and {config.smem_bytes()} bytes does not fit an SM")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded functions of one configuration; blocks: how many are launched, all of them resident."""

    dims: Dims
    config: Config
    blocks: int
    functions: dict[str, Function]


def build_kernels(dims: Dims, config: Config, arch: str, sms: int) -> Kernels:
    """Compiles and loads what the launches need. Needs a GPU; `_build.build` alone does not."""
    config.check(dims, arch)
    noted = "STAMPS" in dict(config.trials)  # which costs the widest build some registers that it lacks
    functions = load(build(config.source, config.defines(dims.heads), arch, allow_spills=noted).code, entries(config))
    check_resident(config, functions["tree_mla"].blocks_per_sm(config.threads, config.smem_bytes()))
    if merges_later(config):
        functions[MERGE].allow_smem(MERGE_SMEM)
    return Kernels(dims, config, sms, functions)


def plan_call(dims: Dims, config: Config, blocks: int, at: Mapping[str, int]) -> Call:
    """Lists the step's items: once, before the first layer. at: as in `fill_params`; what a layer alone needs may be 0."""
    plan, _ = fill_params(dims, config, at, 1.0, blocks)
    return Call("tree_mla_plan", (1, 1, 1), 256, 0, (plan,))


def layer_call(
    dims: Dims, config: Config, blocks: int, at: Mapping[str, int], scale: float, slots: int = 0, behind_plan: bool = False
) -> Call:
    """One layer's attention. slots: cache rows S, for the copy engine's bounds (wgmma). behind_plan: of the layers that share a plan the
    first: with EARLY_KEYS it reads the list before it waits for the kernel that writes it, so it starts when that has ended."""
    _, params = fill_params(dims, config, at, scale, blocks)
    arguments: tuple[Any, ...] = (params,)
    if config.wgmma:
        boxes = ((at["cache"], slots, params.box_keys), (at["q"], dims.M * dims.heads, config.columns))
        arguments += tuple(tensor_map(first, rows, WIDTH, 2 * WIDTH, box) for first, rows, box in boxes)
    early = bool(dict(config.trials).get("EARLY_KEYS"))
    return Call("tree_mla", (blocks, 1, 1), config.threads, config.smem_bytes(), arguments, pdl=not (early and behind_plan))


def merge_call(dims: Dims, config: Config, blocks: int, at: Mapping[str, int], scale: float) -> Call:
    """What follows `layer_call` where `merges_later`."""
    mergers = dict(config.trials).get("MERGERS") or (2 if config.octets == 1 else 4)  # kMergers
    return Call(MERGE, (mergers * blocks, 1, 1), MERGE_THREADS, 0, (fill_params(dims, config, at, scale, blocks)[1],))


def plan_launch(kernels: Kernels, at: Mapping[str, int], keep: tuple[Any, ...] = ()) -> Launch:
    """`plan_call` on the current device."""
    return plan_call(kernels.dims, kernels.config, kernels.blocks, at).launch(kernels.functions, keep)


def layer_launch(
    kernels: Kernels, at: Mapping[str, int], scale: float, slots: int = 0, keep: tuple[Any, ...] = (), behind_plan: bool = False
) -> Launch:
    """`layer_call` on the current device."""
    call = layer_call(kernels.dims, kernels.config, kernels.blocks, at, scale, slots, behind_plan)
    return call.launch(kernels.functions, keep)


def merge_launch(kernels: Kernels, at: Mapping[str, int], scale: float, keep: tuple[Any, ...] = ()) -> Launch:
    """`merge_call` on the current device."""
    return merge_call(kernels.dims, kernels.config, kernels.blocks, at, scale).launch(kernels.functions, keep)
