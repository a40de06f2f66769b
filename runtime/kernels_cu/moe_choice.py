"""Which configuration a bucket gets: tuned where measured, the safe default elsewhere; and what tuning tries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from runtime.hw import Hardware
from runtime.kernels_cu._build import include_closure, read_source
from runtime.kernels_cu.moe_config import SM_SMEM_BYTES, Config, Dims


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
        for rows13, rows2, split13 in ((1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 4, 1), (1, 4, 2), (1, 4, 4), (1, 2, 2)):
            for groups, warps, stages, blocks in ((4, 4, 4, 2), (2, 8, 3, 2)):
                yield Config(1, groups, warps, stages, blocks, rows13, rows2, token_rows=few, splits13=split13)
        for rows13, rows2, split13 in ((1, 8, 1), (2, 8, 1), (4, 8, 1), (1, 8, 2), (1, 4, 2)):
            yield Config(1, 4, 8, 4, 1, rows13, rows2, token_rows=few, splits13=split13)
            yield Config(1, 2, 8, 4, 2, rows13, rows2, token_rows=few, splits13=split13)
    if rows <= 4:
        for rows13, rows2 in ((4, 4), (2, 4), (1, 4), (2, 2)):
            yield Config(1, 4, 4, 5, 2, rows13, rows2)
            yield Config(1, 4, 4, 3, 3, rows13, rows2)
            yield Config(1, 4, 4, 4, 2, rows13, rows2)
        yield Config(1, 4, 4, 4, 2, 4, 4, claim=2)
        yield Config(1, 4, 8, 4, 1, 1, 8)
        yield Config(1, 4, 8, 4, 1, 2, 8)
        yield Config(1, 2, 8, 5, 2, 8, 8)
    if 1.5 < rows <= 16:
        for stages, blocks in ((4, 2), (5, 2), (3, 2), (3, 1), (2, 1)):
            yield Config(2, 4, 4, stages, blocks, 4, 4)
        yield Config(2, 4, 4, 4, 2, 2, 4)
        yield Config(2, 4, 4, 4, 2, 4, 4, claim=2)
    if rows > 16:
        yield Config(4, 4, 4, 4, 2, 4, 4)
        yield Config(4, 4, 8, 4, 1, 8, 8)
        yield Config(4, 2, 8, 6, 1, 8, 8)
        yield Config(4, 4, 4, 3, 1, 4, 4)
        yield Config(4, 2, 4, 3, 1, 4, 4)


def _wgmma_candidates(rows: float) -> Iterator[Config]:
    """Hopper: (fewest, most) octets, groups, stages, blocks, batch for 256-row tiles; then two wide warpgroups."""
    shapes: list[tuple[int, int, int, int, int, int]] = []
    if 1 < rows <= 8:
        shapes += [(1, 1, 2, 6, 3, 1), (1, 2, 2, 5, 3, 1), (1, 2, 4, 4, 2, 2)]
    if 4 < rows <= 16:
        shapes += [(1, 3, 4, 4, 2, 2), (2, 3, 4, 4, 2, 2), (2, 3, 2, 5, 3, 1), (1, 3, 2, 5, 3, 1), (1, 4, 4, 4, 2, 1)]
    if 12 < rows <= 48:
        shapes += [(1, 4, 4, 4, 2, 1), (2, 4, 4, 4, 2, 2), (3, 4, 4, 4, 2, 1), (2, 3, 2, 5, 3, 1), (3, 6, 4, 3, 2, 1)]
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
