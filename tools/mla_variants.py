"""Variants of the attention kernel that await a measurement, case by case; `tools/bench_mla.py --variants` times them side by side.

Clocks drift by several percent within a run, so every variant is timed once in each of ROUNDS rounds, beside what is served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.kernels_cu.tree_mla_config import Config, Dims, default_config, served

ROUNDS = 3


def describe(c: Config) -> str:
    kind = "rows" if c.rows else "wgmma" if c.wgmma else f"mma p{c.producers}"
    ahead, parts, chunk = f" a{c.ahead}" if c.ahead else "", "" if c.float_parts else " b16", f" c{c.chunk}" if c.chunk else ""
    trials = "".join(f" {name.lower()}" + (f"={value}" if value > 1 else "") for name, value in c.trials)
    return f"{kind} n{c.columns} s{c.slots}{ahead}{parts}{chunk}{trials}"


def trying(config: Config, *trials: dict[str, int], **change: Any) -> Config:
    """`config` with more trials, those of value 0 left out, and other fields changed."""
    named = dict(config.trials) | {name: value for trial in trials for name, value in trial.items()}
    return replace(config, trials=tuple((name, value) for name, value in named.items() if value), **change)


def variants(case: str, dims: Dims) -> list[Config]:
    """Of a case of bench_mla.CASES; the first is what is served."""
    base = served(default_config(dims), dims)
    base = replace(base, float_parts=False)
    late = [trying(base, {"EARLY_KEYS": 0})]
    ready, rehearsed = {"READY_FIRST": 1}, {"REHEARSED": 1}
    owners = [trying(base, {"OWNERS": n}, ready) for n in (2, 3, 1)] if base.rows else []
    others: dict[str, list[Config]] = {  # the likeliest to gain first
        "8x1x9x4096": [trying(base, rehearsed)],
        "8x10x1x4096": [
            *(trying(base, rehearsed, {"EARLY_BOXES": n}) for n in (9, 25, 0)),  # one tile, all places, two tiles
            *(trying(base, {"EARLY_BOXES": n}) for n in (9, 25)),
        ],
        "8x10x9x4096": [],
        "8x10x33x65536": [*owners[:1], trying(base, ready)],  # too many keys for owners: what a build that could have them costs
        "32x10x9x4096": [*owners, trying(base, ready)],
        "64x10x9x4096": [*owners[:1], trying(base, {"OWNERS": 2}), trying(base, ready), *owners[1:]],
        "64x10x33x65536": [trying(base, {"SOFTEN_FIRST": 0})],
    }
    return [base, *others.get(case, late)]
