#!/usr/bin/env python3
"""Times every candidate of the INT4 MoE at each M and writes the fastest correct one to tuned/<gpu>.json; or suggests sizes of steps.

    python tools/tune.py --tp 1 --m 1,2,4,8,9,16,32,64,90,128,256,512,1024,2048,4096
    python tools/tune.py --buckets --curve h200-tp8 --load 1:2 8:5 32:2 64:1
    python tools/tune.py --buckets --curve ~/.cache/runtime/curves/my-gpu.json --load trace.json --gain tools/results/sweetspot_h200.jsonl

Kernels: choosing happens here alone, never while serving; the file is package data and reviewed like code. A wrong kernel gets
no time. Needs a GPU. Sizes (--buckets, no GPU): which M to capture for a load, given or recorded, on a cost curve, and why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.kernels_cu._build import BuildError, build
from runtime.kernels_cu.moe_choice import candidates, source_digest, tuned_key
from runtime.kernels_cu.moe_config import Config, Dims

SHAPES = {"kimi-k26": (384, 7168, 2048, 8), "kimi-k2": (384, 7168, 2048, 8)}
DEFAULT_M = "1,2,4,8,9,16,32,64,90,128,256,512,1024,2048,4096,8192"


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """(E, H, I, k) from a name or "H,I,E,k"."""
    if text in SHAPES:
        return SHAPES[text]
    hidden, width, experts, top_k = (int(v) for v in text.split(","))
    return experts, hidden, width, top_k


def compiles(job: tuple[dict[str, int], str]) -> str:
    """Fills the cubin cache for one candidate; the reason if it cannot be used."""
    try:
        build("moe_w4.cu", job[0], job[1])
    except BuildError as problem:
        return str(problem)[:160]
    return ""


def warm_cache(configs: list[Config], arch: str) -> set[Config]:
    """Compiles all candidates on all cores; those that compile cleanly."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        reasons = list(pool.map(compiles, [(c.defines(), arch) for c in configs]))
    for config, reason in zip(configs, reasons, strict=True):
        if reason:
            print(f"left out {config}: {reason}")
    return {c for c, reason in zip(configs, reasons, strict=True) if not reason}


def write_tuned(path: Path, entries: dict[str, Any]) -> None:
    """One entry a line, keys sorted; entries already in the file stay unless measured anew."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= entries
    lines = [f"  {json.dumps(key)}: {json.dumps(known[key], sort_keys=True)}" for key in sorted(known)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def suggest(options: argparse.Namespace) -> str:
    """What --buckets prints."""
    from tools import buckets
    from tools.simulate import RESULTS, find_curve

    name, curve = find_curve(options.curve)
    chooser = buckets.Chooser(curve, buckets.read_load(options.load, options.nodes), buckets.read_gain(options.gain or RESULTS))
    return buckets.show(chooser.choose(options.count), name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kimi-k26", help="a name, or H,I,E,k")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the expert width")
    parser.add_argument("--m", default=DEFAULT_M)
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--seconds", type=float, default=0.1, help="timing budget of a candidate")
    parser.add_argument("--out", type=Path, default=None, help="default: the package's tuned/<gpu>.json")
    group = parser.add_argument_group("sizes of steps")
    group.add_argument("--buckets", action="store_true", help="suggest sizes to capture instead of timing kernels")
    group.add_argument("--curve", default="h200-tp8", help="cost curve: a name in tools/curves or a JSON file (default h200-tp8)")
    load_help = "STREAMS:WEIGHT …, or a trace file of the server (--trace): how often so many streams run (default 1 … 64 alike)"
    group.add_argument("--load", nargs="+", default=[f"{s}:1" for s in (1, 2, 4, 8, 16, 32, 64)], help=load_help)
    group.add_argument("--gain", type=Path, default=None, help="records that tell what nodes bring (default: the simulated ones)")
    group.add_argument("--nodes", type=int, default=None, help="fixed tree of so many nodes (default: as many as pay)")
    group.add_argument("--count", type=int, default=24, help="most sizes (default 24)")
    options = parser.parse_args(argv)
    if options.buckets:
        print(suggest(options))
        return
    from runtime.kernels_cu.device import gpu_name
    from tools.moe_rig import LayerCase, Rig, best_of

    rig = Rig()
    experts, hidden, width, top_k = parse_shape(options.shape)
    sizes = [int(m) for m in options.m.split(",")]
    shard = width // options.tp
    by_m = {m: list(candidates(Dims(m, experts, hidden, shard, top_k), rig.arch)) for m in sizes}
    begin = time.perf_counter()
    usable = warm_cache(list(dict.fromkeys(c for cs in by_m.values() for c in cs)), rig.arch)
    print(f"{len(usable)} candidates compiled in {time.perf_counter() - begin:.1f} s")
    weights = rig.make_weights(Dims(1, experts, hidden, shard, top_k))
    read_bps = rig.read_bps()
    print(f"read {read_bps * 1e-12:.3f} TB/s")
    path = options.out or Path(__file__).parents[1] / "runtime" / "kernels_cu" / "tuned" / f"{gpu_name()}.json"
    for m in sizes:
        case = LayerCase(rig, weights, m, options.routing)
        config, ms = best_of(case, [c for c in by_m[m] if c in usable], read_bps, options.seconds)
        floor_us = case.experts() * case.dims.expert_bytes / read_bps * 1e6
        entry = {"config": asdict(config), "us": round(ms * 1e3, 1), "floor_us": round(floor_us, 1), "src": source_digest()}
        print(f"M {m}: {ms * 1e3:.1f} us, floor {floor_us:.1f}, share {floor_us / ms / 1e3:.3f}: {config}", flush=True)
        write_tuned(path, {tuned_key(case.dims): entry})


if __name__ == "__main__":
    main()
