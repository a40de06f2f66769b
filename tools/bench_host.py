#!/usr/bin/env python3
"""Measures what the host takes of a step: the real engine over a worker without a model, or over a model on its device.

    python tools/bench_host.py                                            # no model: S = 1 … 64, plain, trees of 8 and 32, auto
    python tools/bench_host.py --flights h200-demo --policies plain chain tree:8 auto   # as if a device took what that curve says
    python tools/bench_host.py demo --json tools/results/host_h200.jsonl  # the served engine on a GPU, M = 8, 16, 64, 256
    python tools/bench_host.py kimi-k26 --load-format dummy --hf-overrides '{"num_hidden_layers": 8}' \\
        --spec-model model/configs/kimi-k26-dflash.json --json tools/results/host_h200.jsonl

Without a model a stand-in takes the plans, packed as for a device, and answers from a recorded text (tests/fixtures/draft_traces.npz).
Stages are medians over steps in microseconds, one thread: draft, grow, plan, verify (packing), accept; between: what lies
between the stages. Their sum is exposed: the device waits for it. emit is not part of it, since it is done while the next step
runs. Shares of step times are PROJECTED: this machine's host time beside the device times of tools/results/step_h200.jsonl at
the M that was launched, drafts left out, the whole host time beside the device's and not within it.

With a model the engine runs in its own thread, as served, and counts what was exposed: time in which neither a draft nor a step was in
flight. late: flights that were done before the host came to wait, for which the whole flight counts as exposed. share is measured;
beside it stands what the same time would be of a step of 61 layers at TP 8, PROJECTED likewise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from model.tokenizer import Tokenizer
from runtime.allocate import BudgetSpeculation
from runtime.config import AUTO, EngineConfig, SpeculativeConfig
from runtime.curve import CostCurve
from runtime.engine import Engine
from runtime.graph.buckets import fit_sizes
from runtime.speculate import NoSpeculation, Speculator, TreeSpeculation
from runtime.stats import STAGES, EngineStats
from runtime.stream import TextStream
from runtime.types import Emission, Request, SamplingParams
from runtime.worker import Limits
from server.options import WideHelp, add_model_options
from tools.bench_sweetspot import CURVES, PROMPTS, Bench, Opened, made_with, open_model
from tools.replay import States, load_states
from tools.replayed import ReplayedText
from tools.stand_in import StandIn

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "tests" / "fixtures" / "draft_traces.npz"
STEPS = Path(__file__).with_name("results") / "step_h200.jsonl"
STREAMS = (1, 4, 8, 16, 32, 64)
POLICIES = ("plain", "tree:8", "tree:32", "auto")
CURVE = "h200-tp8"  # what auto chooses by
WARM, PROMPT, ROWS, PAGE, LONGEST = 30, 64, 1024, 64, 8192
CASES = ((8, "plain"), (8, "tree:1"), (8, "tree:7"), (8, "tree:31"), (64, "tree:3"))  # M = 8, 16, 64, 256, 256
ASSUMES = "this machine's exposed host time over the record's device time at the same M, no draft"
FULL = "61 layers, TP 8"  # of K2.6, which a served record is projected to


class Stage:
    """An engine over the stand-in, its streams writing for ever."""

    def __init__(self, states: States, tokenizer: Tokenizer, streams: int, policy: str, flights: str = "") -> None:
        limits = Limits(163_840, ROWS, 1 + streams * LONGEST // PAGE, PAGE, LONGEST, states.logits.ids.shape[1])
        config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=ROWS, block_size=PAGE, buckets=tuple(fit_sizes(ROWS, None)))
        device = CostCurve.load(CURVES / f"{flights}.json") if flights else None
        executor = ReplayedText(StandIn(config, limits, device), states)
        make_stream = lambda params: TextStream(tokenizer.stream(True), params, tokenizer.eos_ids)  # noqa: E731
        self.engine = Engine(
            executor, config.replace(enable_prefix_caching=False), make_stream, speculator(executor, policy, flights or CURVE)
        )
        params = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
        for i in range(streams):
            prompt = np.arange(3, 3 + PROMPT, dtype=np.int32) + i
            self.engine.submit(Request(str(i), prompt, params, seed=i), lambda emission: None)

    def step(self) -> dict[str, float]:
        """Microseconds of one step that are the host's, by stage; M that was launched."""
        stats = self.engine._stats
        before, flown_s, start_s = dict(stats.exposed_s), stats.flown_s, time.perf_counter()
        self.engine.step(ahead=True)
        whole_s = time.perf_counter() - start_s - (stats.flown_s - flown_s)
        found = {name: stats.exposed_s[name] - before[name] for name in STAGES}
        return {name: s * 1e6 for name, s in (found | {"between": whole_s - sum(found.values())}).items()}


def speculator(executor: Any, policy: str, curve: str = CURVE) -> Speculator:
    if policy == "plain":
        return NoSpeculation()
    if policy == "auto":
        return BudgetSpeculation(executor, SpeculativeConfig(method="ddtree", tree_budget=AUTO), CostCurve.load(CURVES / f"{curve}.json"))
    if policy == "chain":
        return TreeSpeculation(executor, SpeculativeConfig(method="dflash"))
    return TreeSpeculation(executor, SpeculativeConfig(method="ddtree", tree_budget=int(policy.partition(":")[2])))


def measure_host(states: States, tokenizer: Tokenizer, streams: int, policy: str, steps: int, flights: str = "") -> dict[str, Any]:
    """One record without a model. flights: name of a curve that says what the device takes; then tokens/s are recorded too."""
    stage = Stage(states, tokenizer, streams, policy, flights)
    for _ in range(WARM):
        stage.engine.step()
    before, start_s = stage.engine.stats(), time.perf_counter()
    found = [stage.step() for _ in range(steps)]
    after, took_s = stage.engine.stats(), time.perf_counter() - start_s
    us = {name: round(statistics.median(step[name] for step in found), 1) for name in found[0]}
    exposed = statistics.median(sum(us for name, us in step.items() if name != "emit") for step in found)
    launched = after.bucket_steps - before.bucket_steps
    bucket = launched.most_common(1)[0][0]
    record = {"schema": 1, "kind": "host", "streams": streams, "policy": policy, "M": bucket, "steps": steps, "us": us}
    if flights:
        record |= {"flights": flights, "tok_s": round((after.generation_tokens - before.generation_tokens) / took_s, 1)}
    return record | {"exposed_us": round(exposed, 1), "projected": projected(exposed, bucket), "assumes": ASSUMES}


def projected(exposed_us: float, bucket: int, only: str | None = None) -> dict[str, float]:
    """Shares of a step of that many rows by what was measured of its device time; by layers and TP, of one of these or all."""
    steps: dict[str, dict[int, float]] = {}
    for line in STEPS.read_text(encoding="utf-8").splitlines():
        held = json.loads(line)
        if "M" in held:
            steps.setdefault(f"{held['layers']} layers, TP {held['tp']}", {})[held["M"]] = held["ms"]
    shares = {}
    for name, ms in ((name, steps[name]) for name in steps if only in (None, name)):
        step_us = 1e3 * float(np.interp(bucket, list(ms), list(ms.values())))
        shares[name] = round(exposed_us / (step_us + exposed_us), 4)
    return shares


def measure_served(bench: Bench, opened: Opened, streams: int, policy: str, seconds: float) -> dict[str, Any]:
    """One record of the engine in its own thread, streams replaced as they end."""
    engine = bench.engine(policy)

    def again(emission: Emission) -> None:
        if emission.finish is not None and not ended:
            bench.submit(engine, again)

    ended: list[bool] = []
    engine.start()
    for _ in range(streams):
        bench.submit(engine, again)
    while engine.stats().generation_tokens < 4 * streams:
        time.sleep(0.01)
    before = engine.stats()
    time.sleep(seconds)
    after = engine.stats()
    ended.append(True)
    engine.shutdown(0.0)
    found = exposures(before, after)
    found |= {"projected": projected(found["exposed_us"], found["M"], FULL), "assumes": ASSUMES}
    return {"schema": 1, "kind": "served", "model": opened.name, "streams": streams, "policy": policy} | found


def exposures(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Means over the steps between two moments, and their most frequent M."""
    steps = max(after.steps - before.steps, 1)
    launched = after.bucket_steps - before.bucket_steps
    whole_s, exposed_s = (sum(b.values()) - sum(a.values()) for a, b in (
        (before.bucket_s, after.bucket_s), (before.bucket_exposed_s, after.bucket_exposed_s)))  # fmt: skip
    us = {name: round(1e6 * (after.exposed_s[name] - before.exposed_s[name]) / steps, 1) for name in STAGES}
    return {
        "M": launched.most_common(1)[0][0] if launched else 0, "steps": steps, "step_us": round(1e6 * whole_s / steps, 1),
        "exposed_us": round(1e6 * exposed_s / steps, 1), "share": round(exposed_s / max(whole_s, 1e-9), 4), "us": us,
        "late": after.late_flights - before.late_flights, "tok_s": round((after.generation_tokens - before.generation_tokens) / whole_s, 1),
    }  # fmt: skip


def show(records: Iterable[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    records = list(records)
    table = Table(title="host, µs a step; shares by layers and TP are projected", title_justify="left")
    measured = [name for name in ("share", "tok_s") if name in records[0]]
    for column in ("S", "policy", "M", *records[0]["us"], "exposed", *measured, *records[0]["projected"]):
        table.add_column(column, justify="right")
    for r in records:
        times = [f"{us:.0f}" for us in (*r["us"].values(), r["exposed_us"])]
        shares = [f"{100 * share:.1f} %" for share in r["projected"].values()]
        seen = [f"{r[name]:.0f}" if name == "tok_s" else f"{100 * r[name]:.1f} %" for name in measured]
        table.add_row(str(r["streams"]), r["policy"], str(r["M"]), *times, *seen, *shares)
    Console(width=150).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser("python tools/bench_host.py", description=__doc__, formatter_class=WideHelp)
    add_model_options(parser)
    group = parser.add_argument_group("host")
    group.add_argument("--streams", nargs="+", type=int, default=list(STREAMS), help="without a model (default 1 … 64)")
    group.add_argument("--policies", nargs="+", default=list(POLICIES), help=f"without a model (default {' '.join(POLICIES)})")
    group.add_argument(
        "--flights", default="", metavar="NAME", help="curve of tools/curves that says what the device takes (default: nothing)"
    )
    group.add_argument("--steps", type=int, default=200, help="steps of a case without a model (default 200)")
    group.add_argument("--seconds", type=float, default=3.0, help="of a case with a model (default 3)")
    group.add_argument("--replay", type=Path, default=TRACES, metavar="NPZ", help="trace file, see tools/replay.py; with a dummy model too")
    group.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON list or text file, with a model")
    group.add_argument("--json", type=Path, help="append records")
    group.add_argument("--commit", default="", help="recorded where git is not at hand")
    args = parser.parse_args(given)
    if given and not given[0].startswith("-"):
        args.replay = args.replay if args.load_format == "dummy" else None
        args.max_num_seqs = max(streams for streams, _ in CASES)
        opened = open_model(args)
        bench = Bench(opened)
        records = [measure_served(bench, opened, streams, policy, args.seconds) for streams, policy in CASES]
    else:
        args.backend = "numpy"
        states, tokenizer = load_states(args.replay), Tokenizer.load(ROOT / "model" / "demo")
        records = [measure_host(states, tokenizer, s, policy, args.steps, args.flights) for policy in args.policies for s in args.streams]
    show(records)
    if args.json:
        source = made_with(args)
        with args.json.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(record | source) + "\n" for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
