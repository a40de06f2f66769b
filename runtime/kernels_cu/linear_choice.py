"""Which kernel and configuration a product of few rows gets: tuned where measured (tools/bench_linear.py), the predicted best elsewhere.

One choice for all M of an (N, K, heads), but for the columns that M needs: a row has the same bits in every bucket.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from runtime.hw import HARDWARE, Hardware
from runtime.kernels_cu._build import include_closure, read_source
from runtime.kernels_cu.linear_skinny import MOST_ROWS, SOURCE, Config, Dims, default_config
from runtime.kernels_cu.moe_choice import read_tuned


def tuned_key(dims: Dims) -> str:
    """Name of a tuned entry: the shape without M and strides, which do not matter to the choice."""
    return f"linear_skinny N={dims.N} K={dims.K} heads={dims.heads}"


def source_digest() -> str:
    """Twelve hex digits of everything that the kernel is compiled from."""
    parts = [read_source(SOURCE), *(text for _, text in sorted(include_closure(SOURCE).items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def choose_config(dims: Dims, gpu: str = "", arch: str = "sm_90a", hw: Hardware = HARDWARE["h200"]) -> tuple[Config, str]:
    """(configuration, why): the tuned entry of the shape if it fits at 16 rows, else `default_config`."""
    entry = read_tuned(gpu).get(tuned_key(dims))
    if entry:
        config = Config(**entry["config"])
        if config.fits(replace(dims, M=MOST_ROWS), arch):
            stale = "" if entry["src"] == source_digest() else ", measured on another version of the kernel"
            return replace(config, columns=8 if dims.M <= 8 else 16), f"tuned/{gpu}.json{stale}"
    return default_config(dims, hw, arch), "default"


def library_is_faster(dims: Dims, gpu: str) -> bool:
    """Whether cuBLASLt was faster where both were timed, at the measured M that is the next above; without a record, the kernel's turn."""
    entry = read_tuned(gpu).get(tuned_key(dims), {})
    ours, theirs = entry.get("us", {}), entry.get("library_us", {})
    for m in sorted(int(m) for m in ours if m in theirs):
        if m >= dims.M:
            return float(theirs[str(m)]) < float(ours[str(m)])
    return False
