#!/usr/bin/env python3
"""Measures tokens/s of every budget policy at every number of streams on one loaded model, and writes one record each.

    python tools/bench_sweetspot.py demo --curve h200-demo
    python tools/bench_sweetspot.py kimi-k26 --load-format dummy --hf-overrides '{"num_hidden_layers": 6}' \\
        --spec-model model/configs/kimi-k26-dflash.json --replay tests/fixtures/draft_traces.npz --curve h200-k26-6
    python tools/bench_sweetspot.py demo --streams 1 4 --policies plain tree:4 auto --seconds 0.5 --out /tmp/s.jsonl

Policies: plain (no draft), chain (the drafter's top-1 chain), tree:N (a fixed tree), auto (one budget for all streams on the
curve measured at load). They take turns at each number of streams, so that drift of the machine hits all alike, and in a turn
all begin with the same prompts: what is accepted varies more from prompt to prompt than from policy to policy. Streams write
until the window ends and are replaced when they end. --replay takes what drafts are worth from a record instead of the
model (weights that say nothing accept nothing); a drafter given as a config is then cut as the target is. The measured curve is
written to tools/curves/NAME.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from model.tokenizer import Tokenizer
from runtime import loading
from runtime.allocate import BudgetSpeculation
from runtime.api import Loaded
from runtime.config import AUTO, EngineConfig, SpeculativeConfig
from runtime.cuda_loading import choose_backend, gpu_count
from runtime.curve import CostCurve, CurveKey
from runtime.engine import Engine
from runtime.executor import Executor
from runtime.load_config import LoadConfig
from runtime.measure import device_name, measure_curve
from runtime.sequence import OnEmission, Stream
from runtime.speculate import NoSpeculation, Speculator, TreeSpeculation
from runtime.stats import EngineStats
from runtime.stream import TextStream
from runtime.survey import Silent
from runtime.types import Emission, Request, SamplingParams
from server.options import WideHelp, add_model_options, load_from, model_of
from tools.bench_report import provenance_of
from tools.cut_drafter import fitting_drafter
from tools.record_traces import read_prompts
from tools.replay import load_states
from tools.replayed import ReplayedText

ROOT = Path(__file__).resolve().parents[1]
CURVES = Path(__file__).with_name("curves")
RESULTS = Path(__file__).with_name("results") / "sweetspot_h200.jsonl"
PROMPTS = ROOT / "tests" / "fixtures" / "heldout_prompts.json"
STREAMS = (1, 2, 4, 8, 10, 16, 32, 64)
POLICIES = ("plain", "chain", "tree:3", "tree:4", "tree:7", "tree:8", "tree:16", "tree:32", "auto")  # 3 and 7 fill buckets
CHAIN = 7
WARM_STEPS = 12
TURN_PROMPTS = 41  # how far into the prompts a turn begins behind the one before
MOST_PROMPT = 128  # tokens: prompts come in while others decode, and should not decide the figures
REPLAY_LEN = 2048  # positions of a model whose text is replayed, unless told
MOST_TOKENS = 512  # of a stream before another takes its place: contexts stay short and alike


@dataclass(frozen=True, slots=True)
class Record:
    """One policy at one number of streams; rates over the whole window, means over its steps."""

    curve: str
    streams: int
    policy: str
    tok_s: float
    nodes_per_stream: float  # verified, roots not counted
    accepted_per_step: float  # nodes, a stream
    M: float  # rows launched, padding included
    budget: int | None
    drafted: float  # share of steps with a draft; auto alone decides it
    experts: float  # distinct ones a layer hit, mean; 0: not counted
    steps: int
    model: str
    replayed: bool
    simulated: bool = False


@dataclass(slots=True)
class Window:
    """What was counted between two moments of one engine."""

    seconds: float = 0.0
    stream_steps: int = 0
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    accepted: int = 0
    launched: int = 0
    experts: float = 0.0
    skipped: int = 0

    def add(self, before: EngineStats, after: EngineStats, seconds: float, stream_steps: int) -> None:
        self.seconds += seconds
        self.stream_steps += stream_steps
        self.steps += after.steps - before.steps
        self.tokens += after.generation_tokens - before.generation_tokens
        self.nodes += after.draft_tokens - before.draft_tokens
        self.accepted += after.accepted_tokens - before.accepted_tokens
        self.launched += sum(m * n for m, n in after.bucket_steps.items()) - sum(m * n for m, n in before.bucket_steps.items())
        self.experts += after.experts_sum - before.experts_sum
        self.skipped += after.skipped_drafts - before.skipped_drafts


@dataclass(frozen=True, slots=True)
class Opened:
    """A model to measure. stream: what reads its text; None: nobody, which ends no request early."""

    name: str
    executor: Executor
    config: EngineConfig
    curve: CostCurve
    prompts: Sequence[Sequence[int]]
    tokenizer: Tokenizer | None

    def make_stream(self, params: SamplingParams) -> Stream:
        if self.tokenizer is None:
            return Silent()
        return TextStream(self.tokenizer.stream(params.skip_special_tokens), params, self.tokenizer.eos_ids)


class Bench:
    """One executor under many engines."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self._executor = opened, opened.executor
        self._config = opened.config.replace(enable_prefix_caching=False)
        self._auto = BudgetSpeculation(opened.executor, SpeculativeConfig(method="ddtree", tree_budget=AUTO), opened.curve)
        self._number = itertools.count()

    def speculator(self, policy: str) -> Speculator:
        """ValueError names a policy that is none."""
        name, _, budget = policy.partition(":")
        if policy == "plain":
            return NoSpeculation()
        if policy == "auto":
            return self._auto
        if policy == "chain":
            deepest = min(CHAIN, self._executor.limits.draft_depth)
            return TreeSpeculation(self._executor, SpeculativeConfig(method="dflash", num_speculative_tokens=deepest))
        if name == "tree" and budget.isdigit():
            return TreeSpeculation(self._executor, SpeculativeConfig(method="ddtree", tree_budget=int(budget)))
        raise ValueError(f"policy {policy!r} is none of plain, chain, tree:N, auto")

    def engine(self, policy: str) -> Engine:
        opened = self._opened
        eos_ids = opened.tokenizer.eos_ids if opened.tokenizer else ()
        return Engine(self._executor, self._config, opened.make_stream, self.speculator(policy), eos_ids=eos_ids)

    def submit(self, engine: Engine, on_emission: OnEmission | None = None) -> None:
        """The next stream."""
        number, opened = next(self._number), self._opened
        most = min(MOST_TOKENS, engine.max_model_len // 2)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=opened.tokenizer is None)
        prompt = np.array(opened.prompts[number % len(opened.prompts)][-(engine.max_model_len // 2 - 1) :], np.int32)
        engine.submit(Request(str(number), prompt, params, seed=number), on_emission)

    def measure(self, policy: str, streams: int, seconds: float, turn: int = 0) -> Window:
        """Runs `streams` streams for so many seconds after they have all started, on the prompts of this turn."""
        window, engine = Window(), self.engine(policy)
        self._number = itertools.count(turn * TURN_PROMPTS)

        def submit() -> None:
            self.submit(engine)

        for _ in range(streams):
            submit()
        while sum(bool(emission.tokens) for emission in engine.step(ahead=True)) < streams:
            pass
        for _ in range(WARM_STEPS):
            _replace(engine.step(ahead=True), submit)
        before, start, end = engine.stats(), time.perf_counter(), time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end or not count:
            emitted = engine.step(ahead=True)
            count += len(emitted)
            _replace(emitted, submit)
        window.add(before, engine.stats(), time.perf_counter() - start, count)
        engine.shutdown(0.0)
        return window

    def sweep(self, policies: Sequence[str], streams: int, seconds: float, repeats: int) -> dict[str, Window]:
        """All policies in turn, `repeats` times. A tree too large for a step's rows is left out."""
        rows = self._config.max_num_batched_tokens
        fit = [p for p in policies if streams * (1 + int(p.partition(":")[2] or 0)) <= rows]
        found: dict[str, list[Window]] = {policy: [] for policy in fit}
        for turn in range(repeats):
            for policy in fit if turn % 2 == 0 else reversed(fit):
                found[policy].append(self.measure(policy, streams, seconds, turn))
        return {policy: _sum(windows) for policy, windows in found.items()}


def _replace(emitted: Sequence[Emission], submit: Callable[[], None]) -> None:
    for emission in emitted:
        if emission.finish is not None:
            submit()


def _sum(windows: Sequence[Window]) -> Window:
    total = Window()
    for window in windows:
        for name, value in asdict(window).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def open_model(args: argparse.Namespace) -> Opened:
    """The model as a server would load it, its curve measured; or real steps of it under a recorded text."""
    if args.replay:
        return _open_replayed(args)
    loaded = load_from(args, speculative_config={"method": "ddtree", "tree_budget": AUTO, "model": args.spec_model})
    speculator = loaded.engine.speculator
    assert isinstance(speculator, BudgetSpeculation)
    prompts = short_prompts(loaded, args.prompts)
    return Opened(loaded.name, loaded.engine.executor, loaded.engine.config, speculator.curve, prompts, loaded.tokenizer)


def _open_replayed(args: argparse.Namespace) -> Opened:
    """Needs no tokenizer: prompts are pieces of the record."""
    states, weights = load_states(args.replay), LoadConfig.parse(args.load_format, args.hf_overrides)
    speculative = SpeculativeConfig(method="ddtree", tree_budget=AUTO, model=fitting_drafter(args.spec_model, weights))
    model, tp = model_of(args), args.tensor_parallel_size
    choice = choose_backend(args.backend, args.dtype, tp)
    activations = loading.DTYPES[args.dtype] if choice.backend == "numpy" else "bfloat16"
    source = loading.open_source(model, speculative, weights)
    given = {name: getattr(args, name) for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_pages", "enforce_eager")}
    length = args.max_model_len or min(REPLAY_LEN, source.target.max_positions)
    config = loading.first_config(choice.backend, args.cudagraph_capture_sizes, max_model_len=length, **given)
    config = loading.fit_config(config, source, activations, choice.backend)
    executor = loading.make_executor(source, config, speculative, activations, tp, backend=choice.backend)
    name = f"{source.file.stem}-{source.target.layers}x{source.target.experts}"
    curve = measure_curve(executor, config, speculative, CurveKey(choice.device or device_name(), name, tp))
    prompts = [states.truth[i * 997 % len(states) : i * 997 % len(states) + 48, 0].tolist() or [1] for i in range(64)]
    return Opened(name, ReplayedText(executor, states), config, curve, prompts, None)


def short_prompts(loaded: Loaded, path: Path) -> list[list[int]]:
    """Questions through the chat template, those of at most MOST_PROMPT tokens. ValueError if none is so short."""
    encoded = [loaded.template.encode([{"role": "user", "content": text}], thinking=False) for text in read_prompts(path)]
    short = [tokens for tokens in encoded if len(tokens) <= MOST_PROMPT]
    if not short:
        raise ValueError(f"{path}: none of {len(encoded)} prompts has at most {MOST_PROMPT} tokens")
    return short


def records(curve: str, streams: int, found: dict[str, Window], model: str, replayed: bool) -> Iterator[Record]:
    """One record for each policy, and the best fixed tree once more as `uniform`, as the simulator writes them."""
    made: list[Record] = []
    for policy, w in found.items():
        name, _, budget = policy.partition(":")
        made.append(
            Record(
                curve,
                streams,
                name,
                w.tokens / w.seconds,
                w.nodes / w.stream_steps,
                w.accepted / w.stream_steps,
                w.launched / w.steps,
                int(budget) if budget else None,
                {"plain": 0.0, "auto": 1.0 - w.skipped / w.steps}.get(name, 1.0),
                w.experts / w.steps,
                w.steps,
                model,
                replayed,
            )
        )
    trees = [record for record in made if record.policy == "tree"]
    if trees:
        made.append(replace(max(trees, key=lambda record: record.tok_s), policy="uniform"))
    yield from made


def show(made: Sequence[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(_name(r) for r in made if r.policy != "uniform"))
    table = Table(title=f"Measured tokens/s, {made[0].curve}, {made[0].model}", title_justify="left")
    for column in ("S", *names, "auto ÷ best", "nodes", "accepted", "M", "experts"):
        table.add_column(column, justify="right")
    for streams in dict.fromkeys(r.streams for r in made):
        by = {_name(r): r for r in made if r.streams == streams and r.policy != "uniform"}
        row = [f"{by[name].tok_s:.0f}" if name in by else "–" for name in names]
        auto, others = by.get("auto"), [r.tok_s for name, r in by.items() if name != "auto"]
        if auto:
            row += [f"{auto.tok_s / max(others):.3f}" if others else "–"]
            row += [f"{v:.1f}" for v in (auto.nodes_per_stream, auto.accepted_per_step, auto.M, auto.experts)]
        table.add_row(str(streams), *row)
    Console(width=150).print(table)


def _name(record: Record) -> str:
    return record.policy if record.budget is None else f"{record.policy}:{record.budget}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tools/bench_sweetspot.py", description=__doc__, formatter_class=WideHelp)
    add_model_options(parser)
    group = parser.add_argument_group("sweep")
    group.add_argument("--streams", nargs="+", type=int, default=list(STREAMS), help="numbers of streams (default 1 … 64)")
    group.add_argument("--policies", nargs="+", default=list(POLICIES), help=f"default {' '.join(POLICIES)}")
    group.add_argument("--seconds", type=float, default=0.5, help="window of a policy in one turn (default 0.5)")
    group.add_argument("--repeats", type=int, default=2, help="turns (default 2)")
    group.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON list or text file (default: the held-out questions)")
    group.add_argument("--replay", type=Path, metavar="NPZ", help="trace file that says what is accepted, see tools/replay.py")
    group.add_argument("--curve", required=True, metavar="NAME", help="name of the records and of the measured curve's file")
    group.add_argument("--curves", type=Path, default=CURVES, metavar="DIR", help="where that file goes (default tools/curves)")
    group.add_argument(
        "--json", "--out", dest="out", type=Path, default=RESULTS, help=f"JSON lines; other curves' records stay (default {RESULTS.name})"
    )
    group.add_argument("--commit", default="", help="recorded where git is not at hand")
    args = parser.parse_args(argv)
    try:
        args.max_num_seqs = max(args.streams)
        opened = open_model(args)
        bench = Bench(opened)
        for policy in args.policies:
            bench.speculator(policy)
    except (ValueError, OSError) as error:
        print(f"bench_sweetspot: {error}", file=sys.stderr)
        return 2
    source = made_with(args)
    opened.curve.save(args.curves / f"{args.curve}.json")
    made: list[Record] = []
    for streams in args.streams:
        start = time.perf_counter()
        found = bench.sweep(args.policies, streams, args.seconds, args.repeats)
        made += records(args.curve, streams, found, opened.name, args.replay is not None)
        write(args.out, args.curve, made, source)
        print(f"{streams} streams: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    show(made)
    print(f"wrote {len(made)} records to {args.out}")
    return 0


def made_with(args: argparse.Namespace) -> dict[str, Any]:
    """Machine, versions, commit and command of the records."""
    if args.backend != "numpy" and gpu_count():
        from tools.bench_moe import provenance

        return provenance(args.commit)
    return provenance_of(["python", *sys.argv], threads=1)


def write(path: Path, curve: str, made: Sequence[Record], source: dict[str, Any]) -> None:
    """Writes the records of a curve anew; those of other curves stay."""
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["curve"] != curve] if path.is_file() else []
    lines = [json.dumps({k: _rounded(v) for k, v in asdict(record).items() if v is not None} | source) for record in made]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*kept, *lines]) + "\n", encoding="utf-8")


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
