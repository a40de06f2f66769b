#!/usr/bin/env python3
"""Writes tools/curves/*.json: cost curves to simulate with. Each states where it comes from and what it assumes.

    python tools/curve_models.py
    python tools/curve_models.py --only flat cliff --out /tmp/curves

Models, not measurements of a step, but for cpu-demo.json: real steps of the demo model on the CPU that ran

    python tools/curve_models.py --measure demo
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from runtime import loading
from runtime.config import AUTO, EngineConfig, SpeculativeConfig
from runtime.curve import CostCurve, CurveKey
from runtime.measure import measure_curve

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LAYERS, EXPERTS, TOP_K = 60, 384, 8
EXPERT_BYTES = 3 * 7168 * 2048 * 0.5625  # INT4 with a bf16 scale for 32 values
CURVES = Path(__file__).with_name("curves")
HOST = "host 0.3 ms"

# ms of one MoE layer of K2.6 on one H200, uniform routing, measured 2026-11-29 in graphs with cold weights
H200_TP8_LAYER = {1: 0.0260, 9: 0.0739, 90: 0.3037, 256: 0.3951, 1024: 0.5343}  # Humming, a TP8 shard
H200_TP1_LAYER = {  # the faster of Humming and Chord, all experts on one device
    1: 0.0691, 2: 0.1246, 4: 0.2188, 8: 0.4040, 9: 0.4454, 16: 0.7378, 32: 1.279, 64: 1.914, 90: 2.290, 128: 2.383, 256: 2.784,
    512: 3.185, 1024: 3.544,
}  # fmt: skip


def experts_hit(rows: float) -> float:
    """Distinct experts under uniform independent routing; real tokens hit fewer."""
    return EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)


def from_layers(layer_ms: dict[int, float], fixed_ms: float, row_ms: float) -> Callable[[float], float]:
    """A step of 60 MoE layers, between the measured M interpolated in M, beside a fixed part and one that grows by the row."""
    known = sorted(layer_ms)
    return lambda m: LAYERS * float(np.interp(m, known, [layer_ms[k] for k in known])) + fixed_ms + row_ms * m


def from_bytes(read_bps: float, share: float, ranks: int, fixed_ms: float, row_ms: float) -> Callable[[float], float]:
    """A step whose MoE layers stream each distinct expert once at `share` of the read rate."""
    per_expert = LAYERS * EXPERT_BYTES / ranks / (read_bps * share) * 1e3
    return lambda m: experts_hit(m) * per_expert + fixed_ms + row_ms * m


def write(name: str, key: CurveKey, step_ms: Callable[[float], float], draft_ms: float, note: str, folder: Path) -> Path:
    curve = CostCurve(
        BUCKETS,
        [step_ms(m) / 1e3 for m in BUCKETS],
        key=key,
        draft_s=(draft_ms / 1e3,),
        overhead_s=0.3e-3,
        note=f"{note}; drafter {draft_ms:g} ms, {HOST}: assumptions",
    )
    path = folder / f"{name}.json"
    curve.save(path)
    return path


def models() -> dict[str, tuple[CurveKey, Callable[[float], float], float, str]]:
    """name -> key, ms over M, drafter's ms, provenance."""
    uniform = "uniform independent routing, short context, no prefill: a model, not a measurement of a step"
    return {
        "h200-tp8": (
            CurveKey("h200", "kimi-k26", 8), from_layers(H200_TP8_LAYER, 2.6, 0.004), 0.9,
            f"60 x MoE layer of a TP8 shard measured on one H200 (Humming, 2026-11-29) + 2.6 ms + 4 us a row; {uniform}",
        ),
        "h200-tp1": (
            CurveKey("h200", "kimi-k26", 1), from_layers(H200_TP1_LAYER, 10.0, 0.02), 2.0,
            f"60 x whole MoE layer measured on one H200 (best of Humming and Chord, 2026-11-29) + 10 ms + 20 us a row; {uniform}; "
            "no H200 holds all of K2.6's layers, so this prices K2.6-sized layers one after another",
        ),
        "rtxpro6000-tp8": (
            CurveKey("rtx-pro-6000", "kimi-k26", 8), from_bytes(1.79e12, 0.88, 8, 6.5, 0.02), 1.8,
            f"distinct experts of 60 layers read at 88 % of 1.79 TB/s + 6.5 ms + 20 us a row, computed; {uniform}",
        ),
        "flat": (CurveKey("flat", "none", 1), lambda m: 20.0, 0.9, "20 ms whatever M: everything is overhead"),
        "cliff": (
            CurveKey("cliff", "none", 1), lambda m: (8.0 if m <= 64 else 32.0) + 0.01 * m, 0.9,
            "8 ms to 64 rows, 32 ms above, 10 us a row: a kernel that falls off its fast path",
        ),
        "convex": (
            CurveKey("convex", "none", 1), lambda m: 4.0 + 0.02 * m + 0.0005 * m * m, 0.9,
            "4 ms + 20 us M + 0.5 us M^2: dense compute, where small trees or none are right",
        ),
    }  # fmt: skip


def measure(model: str, folder: Path) -> Path:
    """The curve that `tree_budget: auto` would start with here, as cpu-MODEL.json."""
    speculative = SpeculativeConfig(method="ddtree", tree_budget=AUTO)
    source = loading.open_source(model, speculative)
    config = loading.fit_config(EngineConfig(max_num_batched_tokens=512), source, "float32")
    executor = loading.make_executor(source, config, speculative, "float32", 1)
    curve = measure_curve(executor, config, speculative, CurveKey("cpu", source.path.name, 1))
    curve.note = f"NumPy on {os.cpu_count()} CPU cores, {date.today()}: {curve.note}; largest buckets extrapolated"
    path = folder / f"cpu-{source.path.name}.json"
    curve.save(path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python tools/curve_models.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=sorted(models()), help="names to write (default all)")
    parser.add_argument("--out", type=Path, default=CURVES, help="folder (default tools/curves)")
    parser.add_argument("--measure", metavar="MODEL", help="measure this machine's CPU with a model (demo or a folder), write no models")
    args = parser.parse_args(argv)
    if args.measure:
        print(f"wrote {measure(args.measure, args.out)}")
        return 0
    for name, (key, step_ms, draft_ms, note) in models().items():
        if not args.only or name in args.only:
            print(f"wrote {write(name, key, step_ms, draft_ms, note, args.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
