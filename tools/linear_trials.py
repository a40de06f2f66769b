#!/usr/bin/env python3
"""Times ways in which linear_stream gets its weights and x side by side: as served, carried, kept, both; and carried with other rings.

    python tools/linear_trials.py --json tools/results/linear_trials_h200.jsonl       # the square at 1, 8 and 16 rows; a minute at most
    python tools/linear_trials.py --shapes o,q_b,shared_up --tp 8 --m 1,16            # shards of eight ranks
    python tools/linear_trials.py --build                                             # compiles only; no GPU

A way is checked first: sampled results against float64, and all of them bit for bit against what is served. Then ways take turns, since
clocks drift by several percent within a run: each is timed once a round, by nine replays of a graph of launches over cold weights, as
bench_linear has them, after a cool-down. us is the median of the rounds. Share = least time at the best read rate of the same run / us.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.kernels_cu.linear_choice import choose_stream, source_digest
from runtime.kernels_cu.linear_stream import ARCH, CARRIED_ROWS, Config, candidates
from tools.bench_linear import MAX_ERROR, POOL_BYTES, Case, Shape, builds_of, compiles, describe_config, kimi_shapes, record
from tools.bench_moe import has_gpu, provenance
from tools.graph_timing import BURST, COOL_DOWN_S, capture, replay_us

WANTED = 0.85  # share of the square
COLUMNS = f"{'product':<12}{'M':>4}  {'way':<12}{'us':>8}{'share':>8}{'gain':>8}{'rounds':>8}"


def ways(shape: Shape, gpu: str = "h200", sms: int = 132) -> dict[str, Config]:
    """Configurations at 16 rows by name; the first is what is served."""
    dims = shape.dims(CARRIED_ROWS)
    served = replace(choose_stream(dims, gpu, ARCH, sms=sms)[0], carried=False, kept=False)
    carried = replace(served, carried=True, ahead=0)
    while not carried.fits(dims) and carried.slots > 2:  # a barrier more a slot
        carried = replace(carried, slots=carried.slots - 1)
    found = {"served": served, "carried": carried, "kept": replace(served, kept=True), "both": replace(carried, kept=True)}
    box = carried.groups, carried.tall
    alike = [c for c in candidates(dims, sms=sms) if c.carried and (c.groups, c.tall) == box and c.blocks <= sms]
    others = [c for c in dict.fromkeys([*alike, replace(carried, early=0), replace(carried, early=carried.slots)]) if c != carried]
    return found | {f"carried {i}": c for i, c in enumerate(others, 1)}


@dataclass(slots=True)
class Trial:
    """A way at some M: its graph, what it holds, and us of each round."""

    way: str
    config: Config
    case: Case
    graph: Any
    error: float
    us: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return float(np.median(self.us))


def adds_alike(one: Config, other: Config) -> bool:
    """Whether tiles are as large and cut alike, so that bits must be equal."""
    return (one.rows, one.blocks) == (other.rows, other.blocks)


class Bench:
    """A shape at M rows. Launches hold addresses: the room of each is kept as long as this is."""

    def __init__(self, case: Case, wanted: dict[str, Config]) -> None:
        self.case, self.rooms, self.trials = case, [], []
        self.stream = case.cp.cuda.ExternalStream(case.device.stream)
        served = None
        for way, config in wanted.items():
            runs = case.kernel("stream", config)
            self.rooms.append(case.room)
            error = case.error(runs)
            bits = case.out.copy()
            served = bits if served is None else served
            apart = int((bits.view(case.cp.uint8) != served.view(case.cp.uint8)).sum())
            if not error < MAX_ERROR[case.shape.float_out] or (adds_alike(config, wanted["served"]) and apart):
                fault = f"WRONG, relative error {error:.2e}, {apart} bytes unlike those of what is served"
                print(f"{case.shape.name} M {case.dims.M} {way}: {fault}; not timed", flush=True)
                continue
            self.trials.append(Trial(way, config, case, capture(self.stream, runs), error))

    def round(self) -> None:
        """Each way once."""
        for trial in self.trials:
            time.sleep(COOL_DOWN_S)
            trial.us.append(float(np.median(replay_us(self.stream, trial.graph, 0.0, BURST))) / self.case.calls)


def report(bench: Bench, read_bps: float, options: argparse.Namespace, source: dict[str, Any]) -> None:
    """A line and a record of each way; the first is what the others are compared with."""
    case, timed = bench.case, [trial for trial in bench.trials if trial.us]
    cost = case.shape.cost(case.dims.M)
    floor_us = cost.bytes / read_bps * 1e6
    for trial in timed:
        share, gain = floor_us / trial.median, trial.median / timed[0].median - 1
        head = f"{case.shape.name:<12}{case.dims.M:4d}  {trial.way:<12}{trial.median:8.2f}{share:8.3f}{gain:+8.1%}{len(trial.us):8d}"
        print(f"{head}  {describe_config(trial.config)}, error {trial.error:.1e}", flush=True)
        record(options.json, {
            "schema": 1, **asdict(case.shape), "M": case.dims.M, "way": trial.way, "us": round(trial.median, 2),
            "rounds_us": [round(us, 2) for us in trial.us], "floor_us": round(floor_us, 2), "share": round(share, 4),
            "gain": round(gain, 4), "read_tb_s": round(read_bps * 1e-12, 3), "error": float(f"{trial.error:.2e}"), "calls": case.calls,
            "config": asdict(trial.config), **source, "src": source_digest("stream", asdict(trial.config)),
        })  # fmt: skip


def chosen_shapes(options: argparse.Namespace) -> list[Shape]:
    return [s for s in kimi_shapes() if s.name in options.shapes.split(",") and (s.tp == options.tp or s.name == "square")]


def compile_all(shapes: Sequence[Shape], rows: Sequence[int]) -> int:
    """Builds of all ways, as many at a time as there are processors; a line for each that fails. How many there are."""
    builds = sorted({b for s in shapes for config in ways(s).values() for b in builds_of("stream", config, rows)})
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        reasons = list(pool.map(compiles, [(source, dict(defines), ARCH) for source, defines in builds]))
    for one, reason in zip(builds, reasons, strict=True):
        if reason:
            print(f"can not be built: {one}: {reason}", flush=True)
    return len(builds)


def measure(options: argparse.Namespace, shapes: Sequence[Shape], rows: Sequence[int], end: float) -> None:
    from runtime.kernels_cu.device import CupyDevice
    from tools.moe_rig import Rig

    rig, device = Rig(), CupyDevice()
    read_bps = rig.read_bps()
    pool = rig.normal(POOL_BYTES // 2048, 1024, 5)
    source = provenance(options.commit)
    print(f"{source['gpu']}, best read rate {read_bps * 1e-12:.3f} TB/s; the square should have {WANTED} of it\n{COLUMNS}", flush=True)
    benches = []
    for shape in shapes:
        every = ways(shape, device.gpu, device.sms)
        wanted = {way: c for way, c in every.items() if way == "served" or not options.ways or way in options.ways.split(",")}
        benches += [Bench(Case(device, pool, shape, m, options.calls), wanted) for m in rows]
    longest = 0.0
    for _ in range(options.rounds):
        begin = time.monotonic()
        if begin + longest > end:
            break
        for bench in benches:
            bench.round()
        longest = max(longest, time.monotonic() - begin)
    for bench in benches:
        report(bench, read_bps, options, source)


def main(arguments: list[str] | None = None) -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="square", help=f"of {', '.join(dict.fromkeys(s.name for s in kimi_shapes()))} (default square)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size whose shards are timed (default 1)")
    parser.add_argument("--m", default="1,8,16", help=f"row counts to {CARRIED_ROWS}, comma-separated (default 1,8,16)")
    parser.add_argument("--calls", type=int, default=24, help="launches of a graph, at least, where their weights fit (default 24)")
    parser.add_argument("--ways", default="", help="beside what is served, comma-separated, such as kept,both (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="at most (default 7)")
    parser.add_argument("--seconds", type=float, default=52.0, help="after which no round is begun that would not end by then (default 52)")
    parser.add_argument("--json", type=Path, help="append a record a line of the table")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--build", action="store_true", help="compile all ways and stop; no GPU")
    options = parser.parse_args(arguments)
    rows = [int(m) for m in options.m.split(",")]
    if too_many := [m for m in rows if not 1 <= m <= CARRIED_ROWS]:
        parser.error(f"--m {too_many[0]}: 1 to {CARRIED_ROWS} rows can be carried")
    if not (shapes := chosen_shapes(options)):
        parser.error(f"--shapes {options.shapes} --tp {options.tp}: no such product")
    count = compile_all(shapes, rows)
    print(f"{count} builds in {time.monotonic() - begin:.1f} s", flush=True)
    if options.build:
        return
    if not has_gpu():
        print("no CUDA device here: nothing was run")
        return
    measure(options, shapes, rows, begin + options.seconds)


if __name__ == "__main__":
    main()
