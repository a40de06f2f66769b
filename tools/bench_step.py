#!/usr/bin/env python3
"""Times whole steps of Kimi K2.6's layers on one GPU, with random weights, beside the least time that they must take.

    python tools/bench_step.py                                       # 8 layers (1 dense, 7 of experts): 76 GB, fits one H200
    python tools/bench_step.py --tp 8 --layers 61                    # one rank's shard of the whole model; peers are left out
    python tools/bench_step.py --ops --json tools/results/step_h200.jsonl --plot step.svg --trace step.json

A step is the graph that serves: plan read, every layer, head, sampling, results published; its rows are chains in --streams
sequences of --ctx tokens, every row's next token wanted. ms is the mean of back-to-back replays; an op's time that of its own
launches replayed alone, so that the ops' sum is above the step, whose kernels overlap. share = floor / ms; floors as in
tools/roofline.py, but for the distinct experts that the rows of this very step chose, counted layer by layer. host_us is what
`worker.step` takes before the launch and after the results: packing the plan, reading them. A prompt is timed as the engine
would run it, in chunks of the largest bucket, one token wanted at its end.
Without a GPU it says so and prints the planned floors.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cost import Cost
from runtime.cuda_loading import join_peers, load_parts, make_cuda_worker
from runtime.graph.audit import group_ops, step_known
from runtime.graph.buckets import DEFAULT_SIZES
from runtime.graph.probe import Probe
from runtime.hw import HARDWARE, Hardware, find_hardware
from runtime.kernels_cu.backend import CudaBackend
from runtime.load_config import LoadConfig
from runtime.planning import StepFloor, plan_buckets
from tools.bench_moe import has_gpu, provenance
from tools.step_report import OpTime, Prefill, Step, draw, print_prefill, print_steps, write_trace

PAGE = 64
PROMPTS = "1024,8192,32768"
HOST_STEPS = 20


class Shard:
    """Peers that are not there: the sums of a rank alone. Times of its kernels are a rank's, its numbers are not."""

    rank = 0

    def __init__(self, world: int) -> None:
        self.world = world

    def all_reduce(self, x: Any) -> None:
        """Nothing is added."""

    def all_reduce_norm(self, ops: Any, x: Any, delta: Any, w: Any, eps: float, *, out: Any) -> None:
        ops.add_rms_norm(x, delta, w, eps, out=out)

    def sample(self, ops: Any, logits: Any, drawing: Sequence[Any], **outputs: Any) -> None:
        """Of the rank's own tokens. Masks reach over the whole vocabulary and are left out."""
        *own, mask_rows, masks = drawing
        ops.sample(logits, *own, mask_rows[:0], masks[:0], **outputs)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is built and run. prompts: lengths in tokens."""

    config: str
    layers: int
    tp: int
    buckets: tuple[int, ...]
    ctx: int
    streams: int
    prompts: tuple[int, ...]
    cut_latent: bool = False

    @property
    def overrides(self) -> dict[str, int]:
        return {"num_hidden_layers": self.layers} if self.layers else {}

    def source(self) -> loading.Source:
        return loading.open_source(self.config, SpeculativeConfig(), LoadConfig("dummy", self.overrides, self.cut_latent))

    def engine_config(self) -> EngineConfig:
        rows = self.buckets[-1]
        longest = max([self.ctx + rows, *(p + rows for p in self.prompts)])
        pages = max(self.streams * -(-(self.ctx + rows) // PAGE), -(-longest // PAGE)) + 1
        return loading.first_config(
            "cuda", self.buckets, max_num_seqs=self.streams, max_num_batched_tokens=rows, max_model_len=longest, num_pages=pages,
            block_size=PAGE,
        )  # fmt: skip


def build(setup: Setup, driver: Any, host: Any = None) -> Any:
    """A worker over random weights with every bucket recorded and captured. host: to reach the other ranks; None: they are left out."""
    source, config, speculative = setup.source(), setup.engine_config(), SpeculativeConfig()
    source.target.check_tp(setup.tp)
    config = loading.fit_config(config, source, "bfloat16", "cuda")
    limits, backend = loading.limits_of(source, config, speculative), CudaBackend(driver.device)
    comm = Shard(setup.tp) if host is None else join_peers(driver, backend, host, source.target.hidden)
    parts = load_parts(source, backend, limits, speculative, rank=comm.rank, world=setup.tp)
    token_bytes = loading.bytes_per_token(source, 2)
    return make_cuda_worker(parts, driver, backend, comm, limits, loading.plan_layout(config, limits), config, token_bytes)


def probe_of(worker: Any, setup: Setup, streams: int, ctx: int) -> Probe:
    return Probe(streams, ctx, worker.limits.vocab_size, worker.limits.num_pages, PAGE)


def measure_steps(worker: Any, setup: Setup, repeats: int) -> list[Step]:
    """Every bucket whose rows all want a token, by rising M."""
    probe, hw = probe_of(worker, setup, setup.streams, setup.ctx), worker.backend.hw
    programs = {p.rows: p for p in worker.programs() if p.kind == "step" and p.out_rows == p.rows}
    steps = []
    for found in worker.audit(probe, repeats).programs:
        if found.kind != "step" or found.out_rows < found.rows:
            continue
        rows, records = found.rows, programs[found.rows].records
        plan = probe.step(rows, rows)
        host_us = host_time(worker, plan) if found.us is not None else None
        experts = distinct_experts(worker, records, plan)
        known = {**step_known(records, probe, rows), **({"distinct": experts} if experts else {})}
        floors = {op: sum(r.cost(known).floor_us(hw) for r in group) for op, group in group_ops(records).items()}
        ops = {op.op: OpTime(op.us, floors[op.op], op.launches) for op in found.ops}
        steps.append(Step(rows, min(setup.streams, rows), found.us, sum(floors.values()), host_us, found.launches, ops, experts))
    return sorted(steps, key=lambda step: step.M)


def distinct_experts(worker: Any, records: Sequence[Any], plan: Any) -> float:
    """Distinct experts that a layer's rows choose, the mean over the layers of a step of this plan; 0 without such layers.

    The step's launches run one by one, and each router's logits are looked at as they stand. Random weights have no selection bias.
    """
    worker.step(plan)  # leaves the plan where the first launch reads it
    device, counts = worker.backend.device, []
    for i, record in enumerate(records):
        record.run.run(device.stream)
        if record.op == "route" and (i + 1 == len(records) or records[i + 1].op != "route"):
            sizes = next(r.symbols for r in reversed(records[: i + 1]) if r.op == "route" and r.symbols)
            logits = worker.backend.host(worker.backend.buffer("router_logits", (sizes["M"], sizes["E"]), "f32"))
            chosen = np.argpartition(-logits[: plan.m], sizes["k"] - 1, axis=1)[:, : sizes["k"]]
            counts.append(len(np.unique(chosen)))
    device.synchronize()
    return float(np.mean(counts)) if counts else 0.0


def host_time(worker: Any, plan: Any) -> float:
    """Median microseconds of a step that are the host's alone."""
    samples = []
    for _ in range(HOST_STEPS):
        start = time.perf_counter()
        device_us = worker.step(plan).step_us
        samples.append((time.perf_counter() - start) * 1e6 - device_us)
    return float(np.median(samples))


def measure_prompts(worker: Any, setup: Setup, hw: Hardware) -> list[Prefill]:
    """Prompts in chunks of the largest bucket; the second of two runs."""
    chunk, found = setup.buckets[-1], []
    for prompt in setup.prompts:
        plans = [probe_of(worker, setup, 1, ctx).step(min(chunk, prompt - ctx), 1) for ctx in range(0, prompt, chunk)]
        seconds = 0.0
        for _ in range(2):
            start = time.perf_counter()
            for plan in plans:
                worker.step(plan)
            seconds = time.perf_counter() - start
        floor_us = sum(chunk_floor_us(worker, setup, plan.m, int(plan.ctx[0]), hw) for plan in plans)
        found.append(Prefill(prompt, chunk, seconds * 1e3, floor_us / 1e3))
    return found


def chunk_floor_us(worker: Any, setup: Setup, rows: int, ctx: int, hw: Hardware) -> float:
    """The floor of a chunk of one sequence that wants one token."""
    program = next(p for p in sorted(worker.programs(), key=lambda p: (p.rows, p.out_rows)) if p.kind == "step" and p.rows >= rows)
    known = {**step_known(program.records, probe_of(worker, setup, 1, ctx), rows), "M": rows, "I": 1, "B": 1}
    costs: Iterable[Cost] = (record.cost(known) for record in program.records)
    return sum(cost.floor_us(hw) for cost in costs)


def planned(setup: Setup, hw: Hardware) -> list[Step]:
    """The same rows without times."""
    floors: list[StepFloor] = plan_buckets(setup.source().target, setup.tp, setup.buckets, setup.ctx, hw, streams=setup.streams)
    steps = []
    for floor in floors:
        ops: dict[str, OpTime] = {}
        for row in floor.table:
            if not row.is_link:
                before = ops.get(row.op, OpTime(None, 0.0, 0))
                ops[row.op] = OpTime(None, before.floor_us + row.floor_us, before.launches + row.count)
        steps.append(Step(floor.rows, min(setup.streams, floor.rows), None, floor.floor_us, None, None, ops))
    return steps


def write_records(path: Path, setup: Setup, steps: Sequence[Step], prompts: Sequence[Prefill], source: dict[str, Any]) -> None:
    """One line a bucket, one a prompt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {"schema": 1, "layers": setup.layers, "tp": setup.tp}
    with path.open("a", encoding="utf-8") as file:
        for step in steps:
            file.write(json.dumps({**common, "ctx": setup.ctx, **step.as_json(), **source}) + "\n")
        for prompt in prompts:
            file.write(json.dumps({**common, **prompt.as_json(), **source}) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="kimi-k26", help="a name in model/configs, a config.json or its folder (default kimi-k26)")
    parser.add_argument("--layers", type=int, default=8, help="layers to build, the dense ones first (default 8; 0: all)")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model; rank 0's shard is built (default 1)")
    parser.add_argument("--buckets", type=int, nargs="+", default=list(DEFAULT_SIZES), metavar="M", help="rows of the steps")
    parser.add_argument("--ctx", type=int, default=4096, help="committed tokens of each stream (default 4096)")
    parser.add_argument("--streams", type=int, default=8, help="sequences of a step, as far as it has rows (default 8)")
    parser.add_argument("--prompts", default=PROMPTS, help=f"prompt lengths, comma-separated, or nothing (default {PROMPTS})")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph (default 20)")
    parser.add_argument("--hw", default="h200", choices=sorted(HARDWARE), help="for floors (default h200)")
    parser.add_argument("--ops", action="store_true", help="print every bucket by op")
    parser.add_argument("--json", type=Path, help="append records")
    parser.add_argument("--plot", type=Path, help="write an SVG: times by stage over M")
    parser.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev: each bucket's launches at their ops' mean times")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    prompts = tuple(int(p) for p in options.prompts.split(",") if p)
    buckets = tuple(sorted(set(options.buckets)))
    setup = Setup(options.config, options.layers, options.tp, buckets, options.ctx, options.streams, prompts)
    hw = find_hardware(options.hw)
    if not has_gpu():
        print(f"no CUDA device here: PLANNED floors for {hw.name} ({hw.source}); nothing was run")
        steps = planned(setup, hw)
        print_steps(steps, options.ops)
        if options.plot:
            draw(steps, options.plot, f"Least step time, {setup.layers} layers at TP {setup.tp} on {hw.name}: planned, not measured")
        return
    from runtime.graph.driver import CudaDriver
    from runtime.kernels_cu.device import CupyDevice

    start = time.perf_counter()
    worker = build(setup, CudaDriver(CupyDevice(), eager=False))
    print(f"{worker.backend.weight_bytes / 1e9:.1f} GB of weights and {sum(1 for _ in worker.programs())} graphs "
          f"in {time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
    steps = measure_steps(worker, setup, options.repeats)
    print_steps(steps, options.ops)
    filled = measure_prompts(worker, setup, hw)
    print_prefill(filled)
    source = provenance(options.commit)
    source.pop("src")
    if options.json:
        write_records(options.json, setup, steps, filled, source)
    if options.plot:
        draw(steps, options.plot, f"Step time, {setup.layers} layers at TP {setup.tp}, context {setup.ctx}, {source['gpu']}")
    if options.trace:
        write_trace(options.trace, worker.programs(), steps)


if __name__ == "__main__":
    main()
