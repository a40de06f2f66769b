"""Which kernel and configuration a product of few rows gets: tuned where measured (tools/bench_linear.py), the predicted best elsewhere.

One configuration for all M of an (N, K, heads), but for the columns that M needs: a kernel gives a row the same bits in every bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from runtime.hw import HARDWARE, Hardware
from runtime.kernels_cu import linear_skinny, linear_stream
from runtime.kernels_cu._build import digest
from runtime.kernels_cu.linear_skinny import Dims
from runtime.kernels_cu.moe_choice import read_tuned

SOURCES = {"skinny": (linear_skinny.SOURCE,), "stream": (linear_stream.SOURCE, linear_stream.CARRIED_SOURCE)}


def tuned_key(dims: Dims, kernel: str = "skinny") -> str:
    """Name of a tuned entry: the shape without M and strides, which do not matter to the choice. kernel: of SOURCES."""
    return f"linear_{kernel} N={dims.N} K={dims.K} heads={dims.heads}"


def source_digest(kernel: str = "skinny", config: Mapping[str, Any] | None = None) -> str:
    """Twelve hex digits of everything that the kernel is compiled from, with a configuration other than the default one."""
    return _digest(linear_stream.Config(**config).source if config and kernel == "stream" else SOURCES[kernel][0])


def source_digests(kernel: str) -> set[str]:
    """Of all sources that some configuration of it is compiled from."""
    return {_digest(source) for source in SOURCES[kernel]}


_digest = cache(digest)


def choose_config(dims: Dims, gpu: str = "", arch: str = "sm_90a", hw: Hardware = HARDWARE["h200"]) -> tuple[linear_skinny.Config, str]:
    """(configuration of linear_skinny, why): the tuned entry of the shape if it fits at 16 rows, else `default_config`."""
    entry = read_tuned(gpu).get(tuned_key(dims))
    if entry:
        config = linear_skinny.Config(**entry["config"])
        if config.fits(replace(dims, M=linear_skinny.MOST_ROWS), arch):
            return linear_skinny.widened(config, dims.M), _source(entry, "skinny", gpu)
    return linear_skinny.default_config(dims, hw, arch), "default"


def choose_stream(
    dims: Dims, gpu: str = "", arch: str = "sm_90a", hw: Hardware = HARDWARE["h200"], sms: int = linear_stream.SMS
) -> tuple[linear_stream.Config, str]:
    """The same for linear_stream. Raises ValueError where that takes no such product."""
    entry = read_tuned(gpu).get(tuned_key(dims, "stream"))
    if entry:
        config = linear_stream.widened(linear_stream.Config(**entry["config"]), dims.M)
        if config.fits(dims, arch):
            return config, _source(entry, "stream", gpu)
    return linear_stream.default_config(dims, hw, arch, sms), "default"


def _source(entry: Mapping[str, Any], kernel: str, gpu: str) -> str:
    same = entry["src"] == source_digest(kernel, entry["config"])
    return f"tuned/{gpu}.json{'' if same else ', measured on another version of the kernel'}"


def fastest(dims: Dims, gpu: str, arch: str = "sm_90a") -> str:
    """skinny, stream or library (cuBLASLt): of those that take the product and were timed, the fastest at the measured M that is the next
    above. A kernel's time counts while the kernel is the one that was timed. What no record names has no turn, but for `skinny`, which
    goes first where nothing else was timed along with it."""
    tuned = read_tuned(gpu)
    skinny, stream = tuned.get(tuned_key(dims), {}), tuned.get(tuned_key(dims, "stream"), {})
    us = {"library": _us_at(stream, "library_us", dims.M) or _us_at(skinny, "library_us", dims.M)}
    if linear_skinny.takes(dims):
        us["skinny"] = _own_us(skinny, "skinny", dims.M)
    if linear_stream.takes(dims, arch):
        us["stream"] = _own_us(stream, "stream", dims.M)
    timed = {kernel: time for kernel, time in us.items() if time}
    if "skinny" in us and (not timed or ("skinny" not in timed and "stream" not in timed)):
        return "skinny"
    return min(timed, key=lambda kernel: timed[kernel], default="library")


def _own_us(entry: Mapping[str, Any], kernel: str, m: int) -> float:
    return _us_at(entry, "us", m) if entry.get("src") == source_digest(kernel, entry.get("config")) else 0.0


def _us_at(entry: Mapping[str, Any], times: str, m: int) -> float:
    """Microseconds at the smallest measured M from `m` on; 0 where none was."""
    found = {int(measured): float(us) for measured, us in entry.get(times, {}).items() if int(measured) >= m}
    return found[min(found)] if found else 0.0
