"""The INT4 mixture of experts: what can be chosen, what it costs, and the launches of one layer.

    [moe_route_sort | moe_sort] -> moe_w4 -> moe_combine

Grids are fixed for a bucket; how many experts and rows there are is read from device memory. Dead rows have expert -1.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from runtime.hw import Hardware
from runtime.w4 import GROUP, UNIT_BYTES, UNIT_ROWS

HEAD_BYTES = 1024  # kHead of moe_w4.cu
MAIL_BYTES = 2048  # one warp's sums of one octet, float32
MAX_SMEM_BYTES = {"sm_80": 166912, "sm_89": 101376, "sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}
SM_SMEM_BYTES = {"sm_80": 167936, "sm_89": 102400, "sm_90a": 233472, "sm_100a": 233472, "sm_120a": 102400}
BLOCK_RESERVE_BYTES = 1024
SORT_THREADS = 512


@dataclass(frozen=True, slots=True)
class Dims:
    """A layer's shape: M rows of a bucket, E experts, top_k a token, H hidden, F expert width on this rank."""

    M: int
    E: int
    H: int
    F: int
    top_k: int

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernels cannot take."""
        for name, value, step in (("H", self.H, 64), ("F", self.F, 32)):
            if value < step or value % step:
                raise ValueError(f"moe_w4: {name} = {value} is not a positive multiple of {step}")
        if not 1 <= self.top_k <= min(32, self.E):
            raise ValueError(f"moe_w4: top_k = {self.top_k} is outside 1..{min(32, self.E)}")
        if not 1 <= self.E <= 1024:
            raise ValueError(f"moe_w4: E = {self.E} is outside 1..1024")
        if self.M < 1:
            raise ValueError(f"moe_w4: M = {self.M}; a bucket has at least one row")

    @property
    def groups(self) -> tuple[int, int]:
        return self.H // GROUP, self.F // GROUP

    @property
    def strips(self) -> tuple[int, int]:
        return 2 * self.F // UNIT_ROWS, self.H // UNIT_ROWS

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of one expert, both matrices."""
        return UNIT_BYTES * sum(g * s for g, s in zip(self.groups, self.strips, strict=True))


@dataclass(frozen=True, slots=True)
class Config:
    """What moe_w4.cu lets us choose.

    octets: token octets a chunk, the most columns an item multiplies. groups: groups of 32 inputs a warp takes of a stage.
    warps: math warps a block. stages: depth of the ring. blocks: blocks an SM. rows13, rows2: warps along rows in the
    gate-up and the down product (the others split K). wgmma: Hopper's product instead of mma.sync. float_parts: per-choice
    sums kept in float32 (else bf16: half the bytes). fragments: 16-row fragments of a strip a warp multiplies, 4 or,
    with wgmma, 2 (fewer registers, so more token octets). wide: the copying warps hand registers to eight math warps.
    merged: one copying warp (wgmma). batch: fragments dequantised while others multiply.
    fewest: octets of the smallest tile built (tiles are 1, 2, 3, 4, 6, 8, 10, 12 octets; each costs registers).
    splits: items that share a down tile's K (shorter last items; their parts are added at the end). token_rows: rows that
    a stage has room for where M is below 8 octets (mma.sync), 0: all.
    """

    octets: int = 1
    groups: int = 4
    warps: int = 4
    stages: int = 5
    blocks: int = 2
    rows13: int = 4
    rows2: int = 4
    wgmma: bool = False
    float_parts: bool = True
    fragments: int = 4
    wide: bool = False
    merged: bool = False
    batch: int = 1
    fewest: int = 1
    splits: int = 1
    token_rows: int = 0

    @property
    def strips(self) -> int:
        """Strips times slices of K that a stage holds."""
        return self.warps * self.fragments // 4

    def wk(self, phase: int) -> int:
        """Slices of K."""
        return self.strips // (self.rows2 if phase else self.rows13)

    def defines(self) -> dict[str, int]:
        return {
            "NB_MAX": self.octets,
            "GW": self.groups,
            "CW": self.warps,
            "FJ": self.fragments,
            "STAGES": self.stages,
            "CTAS": self.blocks,
            "PART_F32": int(self.float_parts),
            "USE_WGMMA": int(self.wgmma),
            "WIDE": int(self.wide),
            "MERGED": int(self.merged),
            "JB": self.batch,
            "NB_MIN": self.fewest,
        }

    @property
    def chunk_rows(self) -> int:
        return 8 * self.octets

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (4 if self.wide else 1 if self.merged else 2))

    def mail_bytes(self) -> int:
        """Shared memory in which slices of K meet; each phase has its own."""
        rows = (self.rows13, self.rows2)
        return sum(rows[p] * (self.wk(p) - 1) for p in (0, 1)) * self.octets * MAIL_BYTES

    def stages_at(self) -> int:
        return -(-(HEAD_BYTES + self.mail_bytes()) // 128) * 128

    def stage_bytes(self) -> int:
        weights = self.strips * self.groups * UNIT_BYTES
        if self.wgmma:
            tokens = self.octets * self.groups * 512
        else:
            tokens = (self.token_rows or self.chunk_rows) * self._token_row_bytes()
        return -(-(weights + tokens) // 128) * 128

    def _token_row_bytes(self) -> int:
        return max(self.wk(p) * self.groups * 64 + 16 for p in (0, 1))

    def smem_bytes(self) -> int:
        beyond = (self.chunk_rows - self.token_rows) * self._token_row_bytes() if self.token_rows else 0  # read, never used
        return self.stages_at() + self.stages * self.stage_bytes() + beyond

    def check(self, dims: Dims, arch: str = "sm_90a") -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        for name, rows, strips in (("rows13", self.rows13, dims.strips[0]), ("rows2", self.rows2, dims.strips[1])):
            if self.strips % rows or strips % rows:
                raise ValueError(f"{self}: {name} = {rows} must divide the stage's {self.strips} strips and the matrix's {strips}")
        if self.octets > (12 if self.wgmma else 4):
            raise ValueError(f"{self}: {self.octets} octets; mma.sync takes up to 4, wgmma up to 12")
        if self.wgmma and (arch != "sm_90a" or (self.rows13, self.rows2) != (self.strips, self.strips)):
            raise ValueError(f"{self}: wgmma needs sm_90a (not {arch}) and all warps along rows")
        if self.fragments != 4 and not (self.wgmma and self.fragments == 2):
            raise ValueError(f"{self}: {self.fragments} fragments a warp; 4, or 2 with wgmma")
        if self.wgmma and any(g % self.groups for g in dims.groups):
            raise ValueError(f"{self}: wgmma needs whole stages; {dims.groups} groups along K do not divide by {self.groups}")
        if self.wide and not (self.wgmma and self.warps == 8 and self.blocks == 1):
            raise ValueError(f"{self}: wide is for wgmma with 8 math warps and one block an SM")
        if self.splits < 1 or dims.groups[1] % self.splits or (self.splits > 1 and self.wgmma):
            raise ValueError(f"{self}: splits = {self.splits} must divide the {dims.groups[1]} groups of the down product; mma.sync only")
        if self.token_rows and (self.wgmma or not min(dims.M, self.chunk_rows) <= self.token_rows <= self.chunk_rows):
            raise ValueError(f"{self}: token_rows = {self.token_rows}; a chunk may hold {min(dims.M, self.chunk_rows)}")
        if self.merged and (self.wide or not self.wgmma):
            raise ValueError(f"{self}: merged is for wgmma that is not wide")
        if not 1 <= self.fewest <= self.octets:
            raise ValueError(f"{self}: fewest = {self.fewest} is outside 1..{self.octets}")
        if self.batch not in (1, 2) or (self.batch == 2 and not self.wgmma):
            raise ValueError(f"{self}: batch = {self.batch}; 1, or 2 with wgmma")
        room = min(MAX_SMEM_BYTES[arch], SM_SMEM_BYTES[arch] // self.blocks - BLOCK_RESERVE_BYTES)
        if self.smem_bytes() > room:
            raise ValueError(f"{self}: {self.smem_bytes()} bytes of shared memory, {room} fit with {self.blocks} blocks on {arch}")

    def fits(self, dims: Dims, arch: str = "sm_90a") -> bool:
        try:
            self.check(dims, arch)
        except ValueError:
            return False
        return True


def _divisor(strips: int, most: int) -> int:
    """The largest of 4, 2, 1 that divides `strips` and does not pass `most`."""
    return next(n for n in (4, 2, 1) if strips % n == 0 and n <= most)


def default_config(dims: Dims, arch: str = "sm_90a") -> Config:
    """The safe choice where nothing is tuned: mma.sync, as deep a ring as fits."""
    rows = dims.M * dims.top_k / dims.E
    octets = 1 if rows <= 2 else 2
    few = min(dims.M * dims.top_k, dims.E) < 24
    rows13, rows2 = _divisor(dims.strips[0], 2 if few else 4), _divisor(dims.strips[1], 2 if few else 4)
    blocks = 2 if SM_SMEM_BYTES[arch] > 160 << 10 else 1
    for groups in (4, 2, 1):
        for stages in (6, 5, 4, 3, 2):
            config = Config(octets, groups, 4, stages, blocks, rows13, rows2, float_parts=dims.M <= 128)
            if config.fits(dims, arch):
                return config
    raise ValueError(f"moe_w4: no configuration fits {dims} on {arch}")


def candidates(dims: Dims, arch: str = "sm_90a") -> Iterator[Config]:
    """The legal configurations worth timing at this M, by rows an expert (uniform routing); no duplicates."""
    choices = dims.M * dims.top_k
    rows = choices / (dims.E * (1.0 - (1.0 - dims.top_k / dims.E) ** dims.M))
    seen: set[Config] = set()
    for config in (*_mma_candidates(dims.M, choices, rows), *(_wgmma_candidates(rows) if arch == "sm_90a" else ())):
        config = replace(config, float_parts=dims.M <= 128)
        if config not in seen and config.fits(dims, arch):
            seen.add(config)
            yield config


def _mma_candidates(m: int, choices: int, rows: float) -> Iterator[Config]:
    """mma.sync: few choices want small tiles and slices of K, more want 256 rows a block."""
    if choices <= 32:
        few = min(m, 8)
        for rows13, rows2, splits in ((1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2), (1, 2, 1), (1, 4, 1)):
            for groups, warps, stages, blocks in ((4, 4, 4, 2), (2, 8, 4, 2), (2, 8, 3, 2)):
                yield Config(1, groups, warps, stages, blocks, rows13, rows2, splits=splits, token_rows=few)
        for rows13, rows2 in ((1, 8), (2, 8), (4, 8)):
            for groups, stages, blocks in ((2, 4, 2), (4, 4, 1), (1, 6, 2)):
                yield Config(1, groups, 8, stages, blocks, rows13, rows2, token_rows=few)
    if rows <= 4:
        for rows13, rows2 in ((4, 4), (2, 4), (1, 4), (2, 2)):
            yield Config(1, 4, 4, 5, 2, rows13, rows2)
            yield Config(1, 4, 4, 3, 3, rows13, rows2)
            yield Config(1, 4, 4, 4, 2, rows13, rows2)
        yield Config(1, 4, 4, 4, 2, 4, 4, splits=2)
        yield Config(1, 2, 8, 5, 2, 8, 8)
    if 1.5 < rows <= 16:
        for stages, blocks in ((4, 2), (5, 2), (3, 2), (3, 1), (2, 1)):
            yield Config(2, 4, 4, stages, blocks, 4, 4)
        yield Config(2, 4, 4, 4, 2, 2, 4)
    if rows > 16:
        yield Config(4, 4, 4, 4, 2, 4, 4)
        yield Config(4, 4, 4, 3, 1, 4, 4)
        yield Config(4, 2, 4, 3, 1, 4, 4)


def _wgmma_candidates(rows: float) -> Iterator[Config]:
    """Hopper: (fewest, most) octets, groups, stages, blocks, batch for 256-row tiles; then two wide warpgroups."""
    shapes: list[tuple[int, int, int, int, int, int]] = []
    if 1 < rows <= 8:
        shapes += [(1, 1, 2, 6, 3, 1), (1, 2, 2, 5, 3, 1), (1, 2, 4, 4, 2, 2)]
    if 4 < rows <= 16:
        shapes += [(1, 3, 4, 4, 2, 2), (2, 3, 2, 5, 3, 1), (1, 3, 2, 5, 3, 1), (1, 4, 4, 4, 2, 1)]
    if 12 < rows <= 48:
        shapes += [(1, 4, 4, 4, 2, 1), (2, 4, 4, 4, 2, 2), (3, 4, 4, 4, 2, 1), (4, 4, 2, 5, 3, 1), (2, 3, 2, 5, 3, 1), (3, 6, 4, 3, 2, 1)]
    for fewest, octets, groups, stages, blocks, batch in shapes:
        yield Config(octets, groups, 4, stages, blocks, 4, 4, True, fragments=4, merged=True, batch=batch, fewest=fewest)
    if rows > 12:
        for fewest, octets in ((3, 4), (3, 6), (4, 8)):
            yield Config(octets, 4, 8, 4, 1, 8, 8, True, wide=True, batch=2, fewest=fewest)
    if rows > 30:
        for fewest, octets, batch in ((6, 12, 2), (8, 12, 2), (6, 12, 1)):
            yield Config(octets, 4, 8, 5, 1, 4, 4, True, fragments=2, wide=True, batch=batch, fewest=fewest)


def predict_us(dims: Dims, config: Config, hw: Hardware) -> float:
    """Microseconds of a layer: the larger of streaming and multiplying, with what the tiles waste, plus launches.

    Uniform routing. Weights pass once a chunk; an octet costs a full octet however empty it is.
    """
    choices = dims.M * dims.top_k
    experts = dims.E * (1.0 - (1.0 - dims.top_k / dims.E) ** dims.M)
    rows = choices / experts
    chunks = experts * max(1.0, rows / config.chunk_rows)
    octets = chunks * -(-min(rows, config.chunk_rows) // 8)
    stream = chunks * dims.expert_bytes / (0.95 * hw.read_bps)
    rate = (0.9 if config.wgmma else 0.5) * hw.tensor_flops
    math = 2.0 * octets * 8 * 3 * dims.F * dims.H / rate
    tokens = 2.0 * choices * dims.H * (4 if config.float_parts else 2) / hw.read_bps
    return (max(stream, math) + tokens) * 1e6 + 6.0


def tuned_key(dims: Dims) -> str:
    """Name of a tuned entry: the shape without what does not matter to the choice."""
    return f"moe_w4 E={dims.E} H={dims.H} F={dims.F} k={dims.top_k} M={dims.M}"


def source_digest() -> str:
    """Twelve hex digits of everything the kernel is compiled from."""
    from runtime.kernels_cu._build import include_closure, read_source

    parts = [read_source("moe_w4.cu"), *(text for _, text in sorted(include_closure("moe_w4.cu").items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@cache
def read_tuned(gpu: str) -> dict[str, Any]:
    """Entries of tuned/<gpu>.json; empty where there is none."""
    file = resources.files("runtime.kernels_cu").joinpath("tuned", f"{gpu}.json")
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def choose_config(dims: Dims, gpu: str = "", arch: str = "sm_90a") -> tuple[Config, str]:
    """(configuration, why): the tuned entry of this M or of the nearest larger one with the same shape, else the default."""
    prefix = tuned_key(dims).rpartition("M=")[0] + "M="
    sizes = sorted(int(key.removeprefix(prefix)) for key in read_tuned(gpu) if key.startswith(prefix))
    for size in [m for m in sizes if m >= dims.M] or sizes[-1:]:
        entry = read_tuned(gpu)[f"{prefix}{size}"]
        config = Config(**entry["config"])
        if config.fits(dims, arch):
            stale = "" if entry["src"] == source_digest() else ", measured on another version of the kernel"
            return config, f"tuned/{gpu}.json M={size}{stale}"
    return default_config(dims, arch), "default"


class Phase(ctypes.Structure):
    """`Phase` of moe_w4.cu."""

    _fields_ = [
        ("w", ctypes.c_void_p), ("in_", ctypes.c_void_p), ("strips", ctypes.c_int), ("groups", ctypes.c_int),
        ("wn", ctypes.c_int), ("wk", ctypes.c_int), ("splits", ctypes.c_int), ("shift", ctypes.c_uint32), ("factor", ctypes.c_float),
    ]  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of moe_w4.cu."""

    _fields_ = [
        ("phase", Phase * 2), ("hidden", ctypes.c_void_p), ("part", ctypes.c_void_p), ("chunks", ctypes.c_void_p),
        ("total", ctypes.c_void_p), ("choice", ctypes.c_void_p), ("weight", ctypes.c_void_p), ("claim", ctypes.c_void_p),
        ("ready", ctypes.c_void_p), ("top_k", ctypes.c_int), ("hidden_row", ctypes.c_int), ("part_row", ctypes.c_int),
        ("choices", ctypes.c_int), ("most_chunks", ctypes.c_int), ("stage_bytes", ctypes.c_int), ("stages_at", ctypes.c_int),
    ]  # fmt: skip


class Sorted(ctypes.Structure):
    """`Sorted` of moe_route.cu."""

    _fields_ = [
        ("chunks", ctypes.c_void_p), ("total", ctypes.c_void_p), ("choice", ctypes.c_void_p), ("weight", ctypes.c_void_p),
        ("octets", ctypes.c_void_p), ("claim", ctypes.c_void_p), ("ready", ctypes.c_void_p), ("arrived", ctypes.c_void_p),
        ("chunk_rows", ctypes.c_int),
    ]  # fmt: skip


def scale_shift(exponent: int) -> int:
    """`prim::scale_shift`: what is added to a packed scale pair."""
    return (129 - exponent) << 23 | (133 - exponent) << 7


def workspace_bytes(dims: Dims, config: Config) -> dict[str, int]:
    """Bytes of each scratch array of a layer, by field name."""
    choices = dims.M * dims.top_k
    chunks = most_chunks(dims, config)
    rows = 8 * most_octets(dims)
    return {
        "chunks": 16 * chunks, "ready": 4 * chunks, "choice": 4 * rows, "row_weight": 4 * rows, "total": 4, "octets": 4, "claim": 4,
        "arrived": 4, "hidden": 2 * rows * dims.F, "part": (4 if config.float_parts else 2) * config.splits * choices * dims.H,
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


def fill_params(dims: Dims, config: Config, at: dict[str, int], exponents: tuple[int, int]) -> tuple[Params, Sorted]:
    """The kernels' arguments. at: address by name: w13, w2, x, weight and every array of `workspace_bytes`."""
    inputs, rows = (at["packed"] if config.wgmma else at["x"], at["hidden"]), (config.rows13, config.rows2)
    phases = [
        Phase(
            w, inputs[i], dims.strips[i], dims.groups[i], rows[i], config.wk(i), config.splits if i else 1, scale_shift(exponents[i]),
            2.0 ** exponents[i],
        )
        for i, w in enumerate((at["w13"], at["w2"]))
    ]
    params = Params(
        (Phase * 2)(*phases), at["hidden"], at["part"], at["chunks"], at["total"], at["choice"], at["row_weight"], at["claim"], at["ready"],
        dims.top_k, dims.F, dims.H, dims.M * dims.top_k, most_chunks(dims, config), config.stage_bytes(), config.stages_at(),
    )  # fmt: skip
    work = Sorted(
        at["chunks"], at["total"], at["choice"], at["row_weight"], at["octets"], at["claim"], at["ready"], at["arrived"], config.chunk_rows
    )
    return params, work


def route_defines(experts: int) -> dict[str, int]:
    """moe_route.cu's constant: scores are kept in registers, 32 experts a lane and register."""
    return {"MAX_EXPERTS": -(-experts // 128) * 128}


@dataclass(slots=True)
class Kernels:
    """The loaded functions of one configuration."""

    dims: Dims
    config: Config
    arch: str
    functions: dict[str, Any]


def build_kernels(dims: Dims, config: Config, arch: str = "sm_90a") -> Kernels:
    """Compiles and loads what `layer_launches` needs. Needs a GPU; `_build.build` alone does not."""
    from runtime.kernels_cu._build import build
    from runtime.kernels_cu._launch import load

    config.check(dims, arch)
    functions = load(build("moe_w4.cu", config.defines(), arch).code, ("moe_w4", "moe_combine", "moe_pack"))
    functions |= load(build("moe_route.cu", route_defines(dims.E), arch).code, ("moe_sort", "moe_route_sort"))
    resident = functions["moe_w4"].blocks_per_sm(config.threads, config.smem_bytes())
    if resident < config.blocks:  # a block that waits for one not yet resident would stall the layer
        raise ValueError(f"{config}: only {resident} blocks an SM are resident, {config.blocks} are launched")
    return Kernels(dims, config, arch, functions)


def layer_launches(
    kernels: Kernels, at: dict[str, int], exponents: tuple[int, int], sms: int, scale: float = 1.0, keep: tuple[Any, ...] = ()
) -> list[Any]:
    """The launches of one layer, in order.

    at: addresses by name as in `fill_params`, and expert, base (0: none), out; with logits (bias, live: 0 for none)
    routing is part of it, otherwise expert and weight are inputs.
    """
    from runtime.kernels_cu._launch import Launch

    dims, config, f = kernels.dims, kernels.config, kernels.functions
    params, work = fill_params(dims, config, at, exponents)
    ptr, i32 = ctypes.c_void_p, ctypes.c_int
    if "logits" in at:
        first = Launch(
            f["moe_route_sort"], (-(-dims.M // (SORT_THREADS // 32)), 1, 1), (SORT_THREADS, 1, 1), 0,
            (ptr(at["logits"]), ptr(at["bias"]), ptr(at["live"]), ptr(at["expert"]), ptr(at["weight"]), ctypes.c_float(scale),
             i32(dims.M), i32(dims.E), i32(dims.top_k), work), keep=keep,
        )  # fmt: skip
    else:
        first = Launch(
            f["moe_sort"], (1, 1, 1), (SORT_THREADS, 1, 1), 0,
            (ptr(at["expert"]), ptr(at["weight"]), i32(dims.M * dims.top_k), i32(dims.E), work), keep=keep,
        )  # fmt: skip
    main = Launch(f["moe_w4"], (sms * config.blocks, 1, 1), (config.threads, 1, 1), config.smem_bytes(), (params,), keep=keep)
    last = Launch(
        f["moe_combine"], (-(-dims.H // 1024), dims.M, 1), (128, 1, 1), 0,
        (ptr(at["part"]), ptr(at["expert"]), ptr(at["base"]), ptr(at["out"]), i32(dims.top_k), i32(config.splits), i32(dims.H)), keep=keep,
    )  # fmt: skip
    if not config.wgmma:
        return [first, main, last]
    slices = -(-dims.H // 1024) if dims.M <= 512 else 1  # a block walks its octet's inputs where octets alone fill the device
    pack = Launch(
        f["moe_pack"], (slices, most_octets(dims), 1), (128, 1, 1), 0,
        (ptr(at["x"]), ptr(at["choice"]), ptr(at["octets"]), ptr(at["packed"]), i32(dims.top_k), i32(dims.H)), keep=keep,
    )  # fmt: skip
    return [first, pack, main, last]
