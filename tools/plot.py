"""Draws the project's plots as SVG: `python tools/plot.py --help`. Needs the extra `plot`."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.curve import CostCurve
from runtime.hw import HARDWARE, find_hardware
from runtime.planning import StepFloor, plan_buckets
from tools.roofline import read_config
from tools.simulate import find_curve

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
EPILOG = """\
examples:
  what a step must cost, by op, from one row to 2,048 (no GPU needed: nothing here is measured)
    python tools/plot.py floor --config kimi-k26 --tp 8 --hw h200 --out docs/floor.svg
  tokens/s over M for each number of streams, and what auto chose (from a record of tools/simulate.py)
    python tools/plot.py sweetspot --curve h200-tp8 --out docs/sweetspot.svg
"""
SWEETSPOT = Path(__file__).with_name("results") / "sweetspot_sim.jsonl"
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
    pyplot = _pyplot()
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


def read_sweetspot(path: Path, curve: str) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Records of one curve by number of streams, then policy. Raises ValueError naming the file and the curves it has."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        if record["curve"] == curve:
            found.setdefault(record["streams"], {}).setdefault(record["policy"], []).append(record)
    if not found:
        raise ValueError(f"{path}: no record of curve {curve!r}; it has {', '.join(sorted({r['curve'] for r in records}))}")
    return dict(sorted(found.items()))


def draw_sweetspot(points: Mapping[int, Mapping[str, list[dict[str, Any]]]], curve: CostCurve, title: str) -> Any:
    """Tokens/s of fixed trees over M, one line a concurrency with the chosen point; below, these points on T(M)."""
    pyplot = _pyplot()
    figure, (top, low) = pyplot.subplots(2, 1, figsize=(8, 6.4), sharex=True, layout="constrained", height_ratios=(2, 1))
    edges = curve.buckets
    low.step(edges, curve.step(edges) * 1e3, where="pre", color="#2f5d8a", linewidth=1.2)
    shades = pyplot.get_cmap("viridis")
    for i, (streams, by) in enumerate(points.items()):
        colour = shades(i / max(1, len(points) - 1) * 0.9)
        fixed = sorted((r["M"], r["tok_s"]) for policy in ("plain", "tree", "uniform") for r in by.get(policy, []))
        best = {m: max(rate for at, rate in fixed if at == m) for m, _ in fixed}
        top.plot(list(best), list(best.values()), color=colour, linewidth=1.2, label="1 stream" if streams == 1 else f"{streams} streams")
        chosen = by["auto"][0]
        top.plot(chosen["M"], chosen["tok_s"], "o", color=colour, markeredgecolor="black", markersize=7)
        step_ms = float(curve.step(round(chosen["M"]))) * 1e3
        low.plot(chosen["M"], step_ms, "o", color=colour, markeredgecolor="black", markersize=6)
        low.annotate(str(streams), (chosen["M"], step_ms), (0, 7), textcoords="offset points", ha="center", fontsize="x-small")
    rates = [r["tok_s"] for by in points.values() for records in by.values() for r in records]
    ticks = [m * 10**e for e in range(7) for m in (1, 2, 5) if min(rates) <= m * 10**e <= max(rates)]
    top.set(xscale="log", yscale="log", ylabel="tokens/s (line: best fixed tree, dot: auto)", title=title)
    top.minorticks_off()
    top.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    top.legend(loc="upper left", frameon=False, ncols=2, fontsize="small")
    low.set(
        xscale="log", xlabel="M, rows of a step = streams × (tree nodes + 1), padding included", ylabel="T(M), ms\n(dot: auto, by streams)"
    )
    low.set_xticks([1, 8, 64, 256, 1024], ["1", "8", "64", "256", "1024"])
    return figure


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "threshold"  # equal input, equal bytes
    from matplotlib import pyplot

    return pyplot


def shortened(svg: str) -> str:
    """With places to a hundredth of a point, which nobody sees. Numbers below 1 may be scales and stay."""
    short = re.sub(r"(?<=[\s\"(,-])[1-9]\d*\.\d{3,}(?=[\s\"),])", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), svg)
    return re.sub(r" +\n", "\n", short)


def save(figure: Any, path: Path) -> None:
    """As SVG."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.write_text(shortened(drawn.getvalue()), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python tools/plot.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what_help = "floor: the least time of a step over M, by op; sweetspot: tokens/s over M and the points that auto chose"
    parser.add_argument("what", choices=["floor", "sweetspot"], help=what_help)
    parser.add_argument("--config", default="kimi-k26", help="floor: kimi-k26, demo or a config.json (default kimi-k26)")
    parser.add_argument("--tp", type=int, default=8, help="floor: tensor-parallel ranks (default 8)")
    parser.add_argument("--hw", default="h200", choices=sorted(HARDWARE), help="floor: machine (default h200)")
    parser.add_argument("--ctx", type=int, default=4096, help="floor: committed tokens of each stream (default 4096)")
    parser.add_argument("--records", type=Path, default=SWEETSPOT, help="sweetspot: JSON lines of tools/simulate.py")
    parser.add_argument("--curve", default="h200-tp8", help="sweetspot: curve to draw, a name in tools/curves or a JSON file")
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    args = parser.parse_args(argv)
    if args.what == "sweetspot":
        try:
            name, curve = find_curve(args.curve)
            points = read_sweetspot(args.records, name)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        simulated = all(r.get("simulated") for by in points.values() for records in by.values() for r in records)
        figure = draw_sweetspot(points, curve, f"Where M is best, {name}{': simulated, not measured' if simulated else ''}")
    else:
        config, _ = read_config(args.config)
        hw = find_hardware(args.hw)
        steps = plan_buckets(config, args.tp, BUCKETS, args.ctx, hw)
        title = f"Floor of a step, {args.config} at TP {args.tp} on {hw.name}: computed, not measured"
        figure = draw_floor(steps, config.experts, config.top_k, title)
    save(figure, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
