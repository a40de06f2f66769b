#!/usr/bin/env python3
"""Replays recorded draft trees under node-budget policies and cost curves. A simulation: no step of a model is timed.

    python tools/simulate.py --traces traces.npz
    python tools/simulate.py --traces traces.npz --curves h200-tp8 my-curve.json --streams 1 10 64 --out sim.jsonl
    python tools/simulate.py --traces traces.npz --half odd --draw 0 --curves h200-tp8 rtxpro6000-tp8 --streams 8 10 16 32 64 \\
        --out tools/results/sweetspot_bound.jsonl

Policies: plain (no draft), chain (the drafter's top-1 chain), tree (a fixed one), uniform (the best of all fixed trees, found by
trying every budget), auto (what the engine does: one budget for all streams, argmax over every n, values calibrated as it goes, streams
weighted by ease), auto-uncalibrated and auto-unweighted (without one of these), first-descent (stops where the rate first
falls: why one must not), oracle (knows the accepted path).
--draw: the target draws its tokens from the drafts, so that no calibration could be better: the bound of auto's gain.
Not in it: correlated routing, growing context, prompts, sampling above temperature 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from runtime.budget import Allocation, Calibration, allocate, ease_weights
from runtime.curve import CostCurve
from runtime.outlook import Outlook
from runtime.price import Price
from runtime.tree import Forest
from runtime.types import I64, Bools
from tools.replay import Grown, States, draw_truth, grow_states, load_states

CURVES = Path(__file__).with_name("curves")
RESULTS = Path(__file__).with_name("results") / "sweetspot_sim.jsonl"
STREAMS = (1, 2, 4, 8, 10, 16, 32, 64)
NAMES = ("h200-tp8", "rtxpro6000-tp8", "h200-tp1", "flat", "cliff", "convex")
HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
CHAIN = 7
TREES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)  # fixed budgets that are recorded one by one, for the plot


@dataclass(frozen=True, slots=True)
class Record:
    """One policy at one point; means over all steps."""

    curve: str
    streams: int
    policy: str
    tok_s: float
    nodes_per_stream: float  # verified, roots not counted
    accepted_per_step: float  # nodes, a stream
    M: float  # rows launched, padding included
    budget: int | None = None  # of the best uniform tree
    drafted: float = 1.0  # share of steps with a draft
    simulated: bool = True


@dataclass(slots=True)
class Replay:
    """Recorded texts on one cost curve."""

    name: str
    curve: CostCurve
    states: States
    grown: Grown
    passes: float = 1.0  # over all texts, by each stream

    def start(self, streams: int) -> I64:
        """Streams begin evenly spread over the texts."""
        return np.arange(streams) * len(self.states) // streams

    def fixed(self, streams: int, policy: str, nodes: int, accepted: float, budget: int | None = None) -> Record:
        """Prices a policy that takes the same rows at every step and accepts `accepted` nodes a stream on average."""
        rows = streams * (1 + nodes)
        seconds = self.curve.step_seconds(rows, streams if nodes else 0)
        rate, drafted = streams * (1 + accepted) / seconds, float(nodes > 0)
        return Record(self.name, streams, policy, rate, nodes, accepted, self._launched(rows), budget, drafted)

    def adaptive(self, streams: int, policy: str, choose: Callable[[I64], Allocation | None]) -> Record:
        """Runs a policy that looks at the drafts until the streams have read all texts once, on average.

        choose(states) gives the allocation, or None: no draft is made.
        """
        at, count = self.start(streams), len(self.states)
        most = int(self.curve.buckets[-1])
        steps = drafts = nodes = tokens = launched = 0
        seconds = 0.0
        while tokens < streams * count * self.passes:
            chosen = choose(at)
            total = chosen.total if chosen else 0
            rows = streams + total
            if rows > most:
                raise ValueError(f"{policy}: {rows} rows, the curve {self.name} ends at {most}")
            accepted = self.grown.accepted_of(at, chosen.kept) if chosen else np.zeros(streams, np.int64)
            moved = self.states.moves(at, accepted + 1)
            at = (at + moved) % count
            seconds += self.curve.step_seconds(rows, streams if chosen else 0)
            steps, drafts = steps + 1, drafts + (chosen is not None)
            nodes, tokens, launched = nodes + total, tokens + int(moved.sum()), launched + self._launched(rows)
        each = streams * steps
        rate = tokens / seconds
        return Record(self.name, streams, policy, rate, nodes / each, tokens / each - 1, launched / steps, None, drafts / steps)

    def _launched(self, rows: int) -> int:
        buckets = self.curve.buckets
        return int(buckets[min(np.searchsorted(buckets, rows), len(buckets) - 1)])

    def auto(self, streams: int, policy: str, *, calibrated: bool, eased: bool) -> Record:
        """What the engine does (runtime/allocate.py), and that without one of its parts."""
        outlook, calibration, price = Outlook(), Calibration(), Price(self.curve, streams)
        last: tuple[Forest, I64, Bools] | None = None

        def choose(at: I64) -> Allocation | None:
            nonlocal last
            if last is not None:
                calibration.observe(last[0], last[2], self.grown.on_path[last[1]] & last[2])
                last = None
            if not outlook.pays(price, base=streams, streams=streams):
                return None
            forest = self.grown.forest_of(at)
            value = calibration.values(forest) if calibrated else self.grown.value[at]
            outlook.observe(value)
            weights = ease_weights(value) if eased else None
            found = allocate(value, price, base=streams, drafted=streams, weights=weights)
            outlook.settle(price, streams, found.expected, found.seconds, streams)
            last = (forest, at, found.kept) if calibrated else None
            return found

        return self.adaptive(streams, policy, choose)

    def first_descent(self, streams: int) -> Record:
        """Adds the best node of all streams as long as the rate rises: stops before the first bucket that does not pay."""
        most = int(self.curve.buckets[-1]) - streams

        def choose(at: I64) -> Allocation:
            falling = np.sort(self.grown.value[at].ravel())[::-1][:most]
            gain = np.concatenate([[0.0], np.cumsum(falling)])
            overhead = self.curve.host.fixed_s + self.curve.draft(streams)
            rate = (streams + gain) / (overhead + self.curve.step(streams + np.arange(len(gain))))
            falls = np.flatnonzero(np.diff(rate) <= 0)
            room = int(falls[0]) if len(falls) else most
            flat = CostCurve((1 << 20,), (1.0,), key=self.curve.key)  # takes all that it may
            return allocate(self.grown.value[at], Price(flat, streams), base=streams, drafted=0, most=room)

        return self.adaptive(streams, "first-descent", choose)

    def oracle(self, streams: int) -> Record:
        """Verifies nodes of the target's path alone, as many as pay: no policy on these trees can do better."""
        path = self.grown.on_path.astype(np.float64)

        def choose(at: I64) -> Allocation | None:
            best = allocate(path[at], Price(self.curve, streams), base=streams, drafted=streams)
            plain = streams / self.curve.step_seconds(streams, 0)
            return best if (streams + best.expected) / best.seconds > plain else None

        return self.adaptive(streams, "oracle", choose)


def uniform_accepts(states: States, grown: Grown, streams: int) -> list[float]:
    """Mean accepted nodes a step for every tree size 0 … N, and for the chain as the last entry: one pass of each stream."""
    every = np.arange(len(states))
    accepted = np.stack([*(grown.accepted(every, budget) for budget in range(grown.exists.shape[1] + 1)), grown.chain])
    policy = np.repeat(np.arange(len(accepted)), streams)
    at = np.tile(np.arange(streams) * len(states) // streams, len(accepted))
    left = np.full(len(at), len(states))
    steps = np.zeros(len(at), np.int64)
    while (live := np.flatnonzero(left > 0)).size:
        moved = states.moves(at[live], accepted[policy[live], at[live]] + 1)
        at[live] = (at[live] + moved) % len(states)
        left[live] -= moved
        steps[live] += 1
    tokens = (len(states) - left).reshape(-1, streams).sum(axis=1)
    means: list[float] = (tokens / steps.reshape(-1, streams).sum(axis=1) - 1).tolist()
    return means


def simulate(replay: Replay, count: int, accepts: Sequence[float]) -> Iterator[Record]:
    """All policies at a number of streams, one record after another."""
    most = int(replay.curve.buckets[-1])
    yield replay.fixed(count, "plain", 0, 0.0)
    if count * (1 + CHAIN) <= most:
        yield replay.fixed(count, "chain", CHAIN, accepts[-1])
    tried = [replay.fixed(count, "uniform", b, accepts[b], b) for b in range(1, len(accepts) - 1) if count * (1 + b) <= most]
    yield from (dataclasses.replace(record, policy="tree") for record in tried if record.budget in TREES)
    if tried:
        yield max(tried, key=lambda record: record.tok_s)
    yield replay.auto(count, "auto", calibrated=True, eased=True)
    yield replay.auto(count, "auto-uncalibrated", calibrated=False, eased=True)
    yield replay.auto(count, "auto-unweighted", calibrated=True, eased=False)
    yield replay.first_descent(count)
    yield replay.oracle(count)


def find_curve(name: str) -> tuple[str, CostCurve]:
    """A curve of tools/curves by name, or a JSON file by path."""
    path = Path(name) if name.endswith(".json") else CURVES / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"curve {name!r}: {path} does not exist; there are {', '.join(sorted(p.stem for p in CURVES.glob('*.json')))}")
    return path.stem, CostCurve.load(path)


def show(records: Sequence[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Simulated tokens/s (replayed drafts, modelled cost)", title_justify="left")
    for column in ("curve", "S", "plain", "chain 7", "uniform (budget)", "auto", "uncalibrated", "unweighted", "first descent", "oracle"):
        table.add_column(column, justify="left" if column == "curve" else "right")
    for column in ("nodes", "M", "drafted", "÷ uniform", "÷ plain"):
        table.add_column(column, justify="right")
    points = dict.fromkeys((r.curve, r.streams) for r in records)
    for curve, streams in points:
        by = {r.policy: r for r in records if (r.curve, r.streams) == (curve, streams)}
        auto = by["auto"]
        rate = {name: f"{r.tok_s:.0f}" for name, r in by.items()}
        best = by.get("uniform", by["plain"])
        shown = [rate[name] for name in ("auto-uncalibrated", "auto-unweighted", "first-descent", "oracle")]
        shown += [f"{auto.nodes_per_stream:.1f}", f"{auto.M:.0f}", f"{auto.drafted:.2f}"]
        shown += [f"{auto.tok_s / max(best.tok_s, by['plain'].tok_s):.3f}", f"{auto.tok_s / by['plain'].tok_s:.3f}"]
        uniform = f"{best.tok_s:.0f} ({best.budget or 0})"
        table.add_row(curve, str(streams), rate["plain"], rate.get("chain", "–"), uniform, rate["auto"], *shown)
    Console(width=170).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tools/simulate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="trace file, see tools/record_traces.py")
    parser.add_argument("--curves", nargs="+", default=list(NAMES), help=f"names in tools/curves or JSON files (default {' '.join(NAMES)})")
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS), help="numbers of streams")
    parser.add_argument("--half", choices=sorted(HALVES), default="all", help="texts to replay: all, or every second one (default all)")
    parser.add_argument("--draw", type=int, metavar="SEED", help="a target that follows the drafter's probabilities exactly")
    parser.add_argument("--passes", type=float, default=1.0, help="how often each stream reads all texts (default 1)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"JSON lines, written anew (default {RESULTS.name})")
    args = parser.parse_args(argv)
    try:
        curves = [find_curve(name) for name in args.curves]
        states = load_states(args.traces, HALVES[args.half])
        texts = args.half if args.draw is None else f"{args.half}, drawn {args.draw}"
    except (ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    from rich.progress import track

    if args.draw is not None:
        states = draw_truth(states, args.draw)
    grown = grow_states(states)
    accepts = {count: uniform_accepts(states, grown, count) for count in args.streams}
    records: list[Record] = []
    points = [(name, curve, count) for name, curve in curves for count in args.streams]
    for name, curve, count in track(points, description="points", transient=True):
        records += simulate(Replay(name, curve, states, grown, args.passes), count, accepts[count])
    show(records)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps({**_rounded(record), "texts": texts}) + "\n" for record in records), encoding="utf-8")
    print(f"wrote {len(records)} records to {args.out}")
    return 0


def _rounded(record: Record) -> dict[str, object]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in dataclasses.asdict(record).items() if v is not None}


if __name__ == "__main__":
    raise SystemExit(main())
