"""Draws the project's plots as SVG: `python tools/plot.py --help`. Needs the extra `plot`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.hw import HARDWARE, find_hardware
from runtime.planning import StepFloor, plan_buckets
from tools.roofline import read_config

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
EPILOG = """\
examples:
  what a step must cost, by op, from one row to 2,048 (no GPU needed: nothing here is measured)
    python tools/plot.py floor --config kimi-k26 --tp 8 --hw h200 --out docs/floor.svg
"""
PARTS = (("experts", ("moe_w4",)), ("linear", ("linear", "silu_mul")), ("attention", ("tree_mla", "mla_query", "mla_value", "mla_latent")))


def stack(steps: Sequence[StepFloor]) -> dict[str, list[float]]:
    """Milliseconds of each part of each step; what no part names is "other"."""
    found: dict[str, list[float]] = {name: [] for name, _ in PARTS} | {"other": []}
    for step in steps:
        left = step.floor_us
        for name, ops in PARTS:
            part = sum(row.floor_us for row in step.table if row.op in ops)
            found[name].append(part / 1e3)
            left -= part
        found["other"].append(left / 1e3)
    return found


def draw_floor(steps: Sequence[StepFloor], experts: int, top_k: int, title: str) -> Any:
    """Stacked floors over M, log-log in M, with the distinct experts on a second axis."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "threshold"  # equal input, equal bytes
    from matplotlib import pyplot

    rows = [step.rows for step in steps]
    parts = stack(steps)
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    axis.stackplot(rows, *parts.values(), labels=list(parts), colors=("#2f5d8a", "#7fa7c9", "#d9a441", "#c9c9c9"))
    axis.set(xscale="log", xlabel="M, rows of a step = streams × (tree nodes + 1)", ylabel="least step time, ms", title=title)
    axis.set_xlim(rows[0], rows[-1])
    axis.set_xticks([1, 8, 64, 256, 1024, 2048], ["1", "8", "64", "256", "1024", "2048"])
    axis.legend(loc="upper left", frameon=False)
    other = axis.twinx()
    other.plot(rows, [experts * (1 - (1 - top_k / experts) ** m) for m in rows], color="#b03a2e", linestyle="--", linewidth=1.2)
    other.set_ylabel("distinct experts a layer (dashed)", color="#b03a2e")
    other.set_ylim(0, experts * 1.05)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python tools/plot.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["floor"], help="floor: the least time of a step over M, by op")
    parser.add_argument("--config", default="kimi-k26", help="kimi-k26, demo or a config.json (default kimi-k26)")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel ranks (default 8)")
    parser.add_argument("--hw", default="h200", choices=sorted(HARDWARE), help="machine (default h200)")
    parser.add_argument("--ctx", type=int, default=4096, help="committed tokens of each stream (default 4096)")
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    args = parser.parse_args(argv)
    config, _ = read_config(args.config)
    hw = find_hardware(args.hw)
    steps = plan_buckets(config, args.tp, BUCKETS, args.ctx, hw)
    title = f"Floor of a step, {args.config} at TP {args.tp} on {hw.name}: computed, not measured"
    draw_floor(steps, config.experts, config.top_k, title).savefig(args.out, metadata={"Date": None})
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
