"""Times variants of the attention kernel side by side: `tools/bench_mla.py --variants`.

All builds come first, as many at a time as there are processors. Then every variant answers for itself twice (a ragged batch
against the NumPy definition, rows of the very case against float64) and is timed as bench_mla times: a graph of launches, each
with a page table of its own over 1.8 GB, the median of nine replays after a cool-down over the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from runtime.kernels_cu._build import BuildError, build
from runtime.kernels_cu.tree_mla_config import Config
from runtime.ops import OPS
from tools.bench_mla import CASES, MAX_ERROR, PAGE, PAGES, WIDTH, Bench, parse_case, source_digest, targets
from tools.graph_timing import BURST, COOL_DOWN_S, replay_us
from tools.mla_rig import Attention
from tools.mla_variants import ROUNDS, describe, trying, variants


def stamped(case: str, config: Config) -> Config:
    """The build that notes where a block's time goes: the third and fourth key tile of an item, or later ones where it has many."""
    return trying(config, {"STAMPS": 2 if parse_case(case).ctx < 8192 else 20})


class Builds:
    """Compiles (configuration, heads) in their order, in processes of their own, which begin before a GPU is touched: the first are timed
    while the last are still being compiled."""

    def __init__(self, wanted: Iterable[tuple[Config, int]], arch: str) -> None:
        self.arch, self.pool = arch, ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 2))
        self.begun = {job: self.pool.submit(_build, *job) for job in dict.fromkeys(self._job(*both) for both in wanted)}

    def _job(self, config: Config, heads: int) -> tuple[str, tuple[tuple[str, int], ...], str, bool]:
        return config.source, tuple(config.defines(heads).items()), self.arch, "STAMPS" in dict(config.trials)

    def wait(self, config: Config, heads: int) -> None:
        """Until that build is in the cache. Raises BuildError where it cannot be made."""
        self.begun[self._job(config, heads)].result()

    def wait_all(self) -> None:
        """Until all are. Raises BuildError for the first that cannot be made."""
        for begun in self.begun.values():
            begun.result()

    def close(self) -> None:
        """Ends the processes, whatever they are at: a program that starts anew must leave none behind."""
        for worker in list(self.pool._processes.values()):
            worker.terminate()
        self.pool.shutdown(wait=False, cancel_futures=True)


def _build(source: str, defines: tuple[tuple[str, int], ...], arch: str, noted: bool) -> None:
    build(source, dict(defines), arch, allow_spills=noted)


# ---------------------------------------------------------------- where a block's time goes
STATIONS = (
    "entered", "predecessor over", "first keys asked for", "first item known", "first scores", "last product", "parts stored",
    "arrival told", "all arrived", "parts there", "added up", "left",
)  # fmt: skip
COMMON = {12: "entered", 13: "left", 14: "merge: its parts are there", 15: "merge: left"}  # one clock
DETAIL_COLUMNS = ("begun", "softened / scored", "weights there", "mixed in")
DETAIL_ROWS = {
    16: "even begun", 17: "scores", 18: "softened, product begun", 19: "product over", 20: "other's product begun", 21: "over",
    24: "odd begun", 25: "scores", 26: "other's product begun", 27: "softened, product begun", 28: "over",
}  # fmt: skip


def timeline(function: Any, rows: bool, clock_hz: float) -> list[str]:
    """Lines for the last launch of a build with STAMPS: us after a block's entry, the median of the blocks and the latest."""
    import cupy as cp

    address = int(function.module.get_global_var("mla_stamps"))
    memory = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(address, 256 * 32 * 8, function), 0)
    raw = cp.asnumpy(cp.ndarray((256, 32), cp.int64, memory))
    stamps = raw[raw[:, 0] > 0] * (1e6 / clock_hz)
    lines = []

    def note(name: str, station: int, origin: int) -> None:
        both = (stamps[:, station] > 0) & (stamps[:, origin] > 0)
        if both.any():
            since = stamps[both, station] - stamps[both, origin]
            lines.append(f"    {name:<40} {np.median(since):8.2f} {since.max():8.2f}  ({int(both.sum())} blocks)")

    for station, name in enumerate(STATIONS):
        note(name, station, 0)
    if rows:
        for station, name in DETAIL_ROWS.items():
            note(name, station, 16)
    else:
        for station in range(16, 32):
            group, tile, step = (station - 16) // 8, (station - 16) // 4 % 2, station % 4
            note(f"group {group}, tile +{tile}: {DETAIL_COLUMNS[step]}", station, 16)
    return lines + common(raw)


def common(raw: np.ndarray) -> list[str]:
    """Lines of the clock that all blocks share: us since the first one's entry; the first block, the quartiles, the last. Beside it the
    processors' clock, which the other lines take for the highest."""
    here = raw[(raw[:, 12] > 0) & (raw[:, 13] > raw[:, 12])]
    if not len(here):
        return []
    begin = here[:, 12].min()
    lines = [f"    {'clock, GHz':<40} {np.median((here[:, 11] - here[:, 0]) / (here[:, 13] - here[:, 12])):8.2f}"]
    for station, name in COMMON.items():
        if (since := (raw[:, station][raw[:, station] > 0] - begin) / 1e3).size:
            spread = " ".join(f"{x:7.2f}" for x in np.percentile(since, (0, 25, 50, 75, 100)))
            lines.append(f"    {name + ', first to last':<40} {spread}  ({since.size} blocks)")
    return lines


# ---------------------------------------------------------------- the run
class SideBySide:
    """One run: the benches of its cases, what has been timed so far, and where records go."""

    def __init__(self, options: argparse.Namespace, cases: list[str], builds: Builds) -> None:
        import cupy as cp

        from tests.runtime.kernels_cu.mla_cases import make_batch
        from tools.bench_moe import provenance
        from tools.moe_rig import Rig

        self.options, self.builds = options, builds
        self.times: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
        rig = Rig()
        pool = rig.normal(PAGES * PAGE, WIDTH, 5)
        self.benches = {case: Bench(pool, rig, parse_case(case)) for case in cases}
        self.clock_hz = 1e3 * cp.cuda.Device().attributes["ClockRate"]  # kHz
        self.outputs: dict[tuple[str, str], Any] = {}  # of each case's first variant, by itself and at a graph's end
        self.batches = {}
        for heads in {bench.case.heads for bench in self.benches.values()}:
            batch = make_batch(heads, [9, 1, 17, 5], [1000, 0, 63, 64], seed=1, bucket=40, sequences=5)
            self.batches[heads] = batch, batch.reference()
        self.source = provenance(options.commit)

    def launches(self, case: str, config: Config) -> tuple[Any, list[Any]]:
        self.builds.wait(config, self.benches[case].case.heads)
        return self.benches[case].launches(config)

    def started(self, case: str, config: Config) -> list[Any]:
        """Its layers' launches, behind the plan."""
        plan, layers = self.launches(case, config)
        plan.run(self.benches[case].rig.stream.ptr)
        return layers

    def wrong(self, case: str, config: Config, error: float) -> str:
        """What is wrong with it: of a ragged batch, or of the rows that gave `error`."""
        from tests.compare import compare
        from tests.runtime.kernels_cu.mla_cases import SCALE

        batch, reference = self.batches[self.benches[case].case.heads]
        found = compare(Attention(batch, config, SCALE).run(), reference, OPS["tree_mla"].tolerance)
        return str(found).splitlines()[0] if not found.ok else "" if error < MAX_ERROR else f"relative error {error:.2e}"

    def unlike(self, case: str, where: str) -> str:
        """What is wrong with all rows of the output that is there, beside those of the case's first variant."""
        bench = self.benches[case]
        apart = bench.apart(self.outputs.setdefault((case, where), bench.out.copy()))
        return "" if apart < 1.5 * MAX_ERROR else f"{where} {apart:.2e} from the first variant"

    def time(self, case: str, config: Config) -> None:
        """One line, and one record where records are wanted."""
        bench, name, times = self.benches[case], describe(config), self.times[case]
        head = f"{case:<16}{name:<64}"
        try:
            launches = self.launches(case, config)
        except (ValueError, BuildError) as refused:
            print(f"{head} {refused}", flush=True)
            return
        error = bench.error(launches)
        fault = self.unlike(case, "alone") or self.wrong(case, config, error)
        graph = None if fault else bench.graph(launches[1])
        if fault := fault or self.unlike(case, "in a graph"):
            print(f"{head} WRONG, not timed: {fault}", flush=True)
            return
        time.sleep(COOL_DOWN_S)
        us = float(np.median(replay_us(bench.rig.stream, graph, 0.0, BURST))) / bench.case.calls
        times.setdefault(name, []).append(us)
        first = next(iter(times.values()))[-1]
        print(f"{head}{us:9.1f} us {us / first - 1:+7.1%}  error {error:.1e}  {targets(case).split(';')[0]}", flush=True)
        if self.options.json:
            record = {
                "schema": 1, **asdict(bench.case), "variant": name, "us": round(us, 2), "gain": round(us / first - 1, 4),
                "error": float(f"{error:.2e}"), "calls": bench.case.calls, "config": asdict(config), **self.source,
                "src": source_digest(config.source),
            }  # fmt: skip
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            with self.options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def summary(self) -> None:
        """What is served and the best variant of every case, each the median of its rounds, against the targets."""
        print(f"{'case':<16}{'served':>10}{'best':>10}{'must':>8}{'goal':>8}  variant")
        for case, times in self.times.items():
            if found := {name: float(np.median(us)) for name, us in times.items()}:
                best = min(found, key=lambda name: found[name])
                must, goal = CASES[case][2:] if case in CASES else ("", "")
                print(f"{case:<16}{next(iter(found.values())):10.1f}{found[best]:10.1f}{must!s:>8}{goal!s:>8}  {best}", flush=True)

    def note(self, case: str, config: Config) -> None:
        """Where a block's time goes, in the last of a graph's launches."""
        bench, noted = self.benches[case], stamped(case, config)
        layers = self.started(case, noted)
        time.sleep(COOL_DOWN_S)
        bench.time_us(layers, 0.0, bench.case.calls)
        print(
            f"{case} {describe(config)}: us since entry, median and latest; of two tiles since the first was begun",
            flush=True,
        )
        print("\n".join(timeline(layers[0].function, noted.rows, self.clock_hz)), flush=True)


def jobs(cases: list[str]) -> list[tuple[str, str, Config]]:
    """("time" or "note", case, variant) in the order in which a run does them: a round goes over all cases before the next begins."""
    every = [(case, config) for case in cases for config in variants(case, parse_case(case).dims)]
    rounds = [("time", *both) for _ in range(ROUNDS) for both in every]
    return [*rounds, *(("note", *both) for both in every)]


def measure_variants(options: argparse.Namespace) -> None:
    """All jobs from `options.first` on; `options.seconds` after the start none is begun. A fault that takes the context with it costs
    its own variant alone, in later rounds too: the program starts anew behind it."""
    begin = time.perf_counter()
    cases = options.cases.split(",")
    todo = jobs(cases)
    configs = ((stamped(case, config) if what == "note" else config, parse_case(case).heads) for what, case, config in todo)
    each = len(todo) // (ROUNDS + 1)
    without = {int(job) for job in options.without.split(",") if job}
    builds = Builds(configs, "sm_90a")
    if options.build:
        builds.wait_all()
        print(f"{len(builds.begun)} builds in {time.perf_counter() - begin:.1f} s", flush=True)
        return
    run = SideBySide(options, cases, builds)
    for i, (what, case, config) in enumerate(todo):
        left = options.seconds - (time.perf_counter() - begin)
        if left < 0:
            print(f"{options.seconds:.0f} s are over before job {i}: {what} {case} {describe(config)}; --first {i} goes on")
            break
        if i < options.first or i % each in without:
            continue
        try:
            (run.time if what == "time" else run.note)(case, config)
        except Exception as fault:  # of whatever type CuPy or the driver raises when a kernel traps
            print(f"{case:<16}{describe(config):<64} FAILED, {type(fault).__name__}: {fault}", flush=True)
            run.summary()
            builds.close()
            restart(i + 1, left, without | {i % each})
    run.summary()
    builds.close()


def restart(first: int, seconds: float, without: set[int]) -> None:
    """This program again, from job `first` on."""
    kept = [word for i, word in enumerate(sys.argv) if not {word, sys.argv[i - 1]} & {"--first", "--seconds", "--without"}]
    names = ",".join(str(job) for job in sorted(without))
    os.execv(sys.executable, [sys.executable, *kept, "--without", names, "--first", str(first), "--seconds", f"{seconds:.0f}"])
