#!/usr/bin/env python3
"""Times whole steps of Kimi K2.6's layers over several GPUs, sums and gathers included, beside their floors.

    python tools/bench_step_ranks.py --layers 16 --json tools/results/step_h200x2.jsonl      # two GPUs, 76 GB of weights each

A step is the graph that serves, with random weights, as in tools/bench_step.py. floor: what a rank must read and compute; link: what the
collectives must take on top, by the planner; share = (floor + link) / ms. comm_us: the collectives replayed alone. ranks_us: the fastest
and the slowest rank's time of the same steps. device_bytes: of a rank's memory that was free before and is not now, beside what is
planned (weights, cache, `runtime.reserve`); NCCL's buffers, graphs and the pool's rounding are in the first alone.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.hw import HARDWARE, Hardware, find_hardware
from runtime.planning import memory_per_rank, plan_buckets
from runtime.reserve import reserve
from tools.bench_moe import provenance
from tools.bench_step import Setup, build, measure_steps
from tools.rank_rig import add_rank_options, join, run_ranks

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
COLLECTIVES = ("all_reduce", "all_reduce_norm", "all_gather")


def planned_device_bytes(setup: Setup, hw: Hardware) -> tuple[int, int]:
    """Of one rank: weights, and all that is planned."""
    source, config = setup.source(), setup.engine_config()
    memory = memory_per_rank(source.target, setup.tp, source.drafter)
    cache = (config.num_pages or 0) * config.block_size * memory.kv_token_bytes
    more = reserve(source.target, setup.tp, source.drafter, hw, config).device_bytes
    return memory.weight_bytes, memory.weight_bytes + cache + more


def shortened(value: Any) -> Any:
    """A record with every fraction to five digits: no timer gives more."""
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run_rank(args: argparse.Namespace) -> int:
    from runtime.cuda_loading import open_driver

    host, hw = join(args), find_hardware(args.hw)
    setup = Setup(args.config, args.layers, args.ranks, tuple(sorted(args.buckets)), args.ctx, args.streams, (), args.cut_latent)
    start, driver = time.perf_counter(), open_driver(False, args.rank)
    (free, _), source = driver.free_bytes() or (0, 0), setup.source()
    worker = build(setup, driver, host)
    held, device_bytes = worker.backend.weight_bytes, free - (driver.free_bytes() or (0, 0))[0]
    planned_bytes, planned_all = planned_device_bytes(setup, hw)
    if args.rank == 0:
        whole = f"{device_bytes / 1e9:.2f} GB of the device in all (planned {planned_all / 1e9:.2f})"
        print(f"{held / 1e9:.2f} GB of weights a rank (planned {planned_bytes / 1e9:.2f}), {whole}, {time.perf_counter() - start:.0f} s")
    steps = measure_steps(worker, setup, args.repeats)
    floors = {f.rows: f for f in plan_buckets(source.target, args.ranks, setup.buckets, args.ctx, hw, streams=args.streams)}
    common: dict[str, Any] = {"schema": 1, "ranks": args.ranks, "layers": args.layers, "ctx": args.ctx, "cut_latent": args.cut_latent}
    common |= {"weight_bytes": held, "planned_bytes": planned_bytes, "device_bytes": device_bytes, "planned_device_bytes": planned_all}
    if args.rank == 0:
        common |= provenance(args.commit)
        common.pop("src")
        print("    M       ms   floor    link   share  comm µs   ranks µs")
    for step in steps:
        all_us = [struct.unpack("d", part)[0] for part in host.gather_bytes(struct.pack("d", step.us or 0.0))]
        if args.rank or step.us is None:
            continue
        floor_us, link_us = floors[step.M].floor_us, floors[step.M].link_us
        share = (floor_us + link_us) / step.us
        comm_us = sum(op.us or 0.0 for name, op in step.ops.items() if name in COLLECTIVES)
        print(f"{step.M:5d} {step.us / 1e3:8.3f} {floor_us / 1e3:7.3f} {link_us / 1e3:7.3f} {share:7.3f} {comm_us:8.1f}   "
              f"{min(all_us):.0f} to {max(all_us):.0f}", flush=True)  # fmt: skip
        if args.json:
            row = {"M": step.M, "ms": step.us / 1e3, "floor_us": floor_us, "link_us": link_us, "share": share, "comm_us": comm_us}
            ops = {name: asdict(op) for name, op in step.ops.items()}
            with args.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps(shortened({**common, **row, "ranks_us": [min(all_us), max(all_us)], "ops": ops})) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--config", default="kimi-k26", help="a name in model/configs, a config.json or its folder (default kimi-k26)")
    parser.add_argument("--layers", type=int, default=16, help="layers to build, the dense ones first (default 16)")
    parser.add_argument("--buckets", type=int, nargs="+", default=list(BUCKETS), metavar="M", help="rows of the steps")
    parser.add_argument("--ctx", type=int, default=4096, help="committed tokens of each stream (default 4096)")
    parser.add_argument("--streams", type=int, default=8, help="sequences of a step, as far as it has rows (default 8)")
    parser.add_argument("--cut-latent", action="store_true", help="cut q_a and kv_a over ranks (docs/ranks.md)")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph (default 20)")
    parser.add_argument("--hw", default="h200", choices=sorted(HARDWARE), help="for floors (default h200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each M")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    return run_rank(args) if args.rank >= 0 else run_ranks(__file__, args, given)


if __name__ == "__main__":
    sys.exit(main())
