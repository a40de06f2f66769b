#!/usr/bin/env python3
"""Captures the graphs of a model and audits them: launches, bytes, flops, floor and time of every bucket, by op if asked.

    python tools/capture.py                                            # the demo model, every default bucket
    python tools/capture.py kimi-k26 --load-format dummy --hf-overrides '{"num_hidden_layers": 8}' --ctx 4096 --streams 10
    python tools/capture.py --sizes 8 64 --detail --json audit.json --dot graphs/

Each bucket is filled with streams of --ctx committed tokens and its graph replayed; an op's time is that of a graph of its own
launches alone, so weights come from memory and the sum over ops is above the whole by what overlaps. share = floor / time.
`steady` says that no device memory was taken by replaying. Without a GPU nothing is captured: the table then shows what the
model's forward costs at least, planned by the null backend, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.cuda_loading import find_gpu
from runtime.cuda_worker import CudaWorker
from runtime.graph.audit import Audit, ProgramAudit, dot
from runtime.graph.buckets import fit_sizes
from runtime.graph.probe import Probe
from runtime.hw import HARDWARE, find_hardware
from runtime.load_config import LoadConfig
from runtime.planning import StepFloor, plan_buckets, plan_draft
from server.options import WideHelp, add_model_options, model_of, speculative_of

HEADER = f"{'graph':<18}{'launches':>9}{'MB':>11}{'GFLOP':>10}{'floor us':>11}{'us':>11}{'share':>8}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=WideHelp)
    add_model_options(parser)
    group = parser.add_argument_group("audit")
    group.add_argument("--ctx", type=int, default=0, help="committed tokens of each stream (default 0)")
    group.add_argument("--streams", type=int, default=8, help="streams that share a bucket (default 8)")
    group.add_argument("--sizes", type=int, nargs="+", metavar="M", help="audit these buckets alone (all are captured)")
    group.add_argument("--repeats", type=int, default=20, help="replays of each graph that are timed (default 20)")
    group.add_argument("--detail", action="store_true", help="one more table a graph: its ops")
    group.add_argument("--json", type=Path, help="write the audit here")
    group.add_argument("--dot", type=Path, metavar="FOLDER", help="write each graph as DOT text here")
    group.add_argument("--hardware", default="h200", help=f"floors of a plan: {', '.join(HARDWARE)} (default h200)")
    return parser


def open_source(args: argparse.Namespace) -> tuple[loading.Source, SpeculativeConfig]:
    speculative = loading.fit_speculation(SpeculativeConfig.parse(speculative_of(args)), "cuda")
    return loading.open_source(model_of(args), speculative, LoadConfig.parse(args.load_format, args.hf_overrides)), speculative


def open_worker(args: argparse.Namespace, source: loading.Source, speculative: SpeculativeConfig) -> CudaWorker:
    """The model on the GPU, captured."""
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "block_size", "gpu_memory_utilization")
    given = {name: getattr(args, name) for name in (*names, "enforce_eager", "batch_invariant")}
    config = loading.first_config("cuda", args.cudagraph_capture_sizes, **given)
    config = loading.fit_config(config, source, "bfloat16", "cuda")
    with tqdm(desc="Loading", unit="part", disable=None, leave=False, file=sys.stderr) as bar:
        return loading.make_gpu_executor(source, config, speculative, lambda _: bar.update())


def program_line(program: ProgramAudit) -> str:
    """One line of the table."""
    name = f"{program.kind} {program.rows}" + (f" out {program.out_rows}" if program.out_rows not in (0, program.rows) else "")
    moved, flops = sum(op.bytes for op in program.ops), sum(op.flops for op in program.ops)
    return f"{name:<18}" + _numbers(program.launches, moved, flops, program.floor_us, program.us)


def op_lines(program: ProgramAudit) -> list[str]:
    """A program's ops, longest first, or by floor where nothing was timed."""
    ops = sorted(program.ops, key=lambda op: -(op.us or op.floor_us))
    return [f"  {op.op:<16}" + _numbers(op.launches, op.bytes, op.flops, op.floor_us, op.us) for op in ops]


def _numbers(launches: int | None, moved: float, flops: float, floor_us: float, us: float | None) -> str:
    timed = f"{us:>11.1f}{floor_us / us:>8.2f}" if us else f"{'-':>11}{'-':>8}"
    return f"{'-' if launches is None else launches:>9}{moved * 1e-6:>11.1f}{flops * 1e-9:>10.2f}{floor_us:>11.1f}{timed}"


def print_audit(audit: Audit, detail: bool) -> None:
    graphs = sum(program.captured for program in audit.programs)
    steady = "no memory was taken by replaying them" if audit.steady else "MEMORY WAS TAKEN by replaying them"
    counted = f"{len(audit.programs)} launches audited, {graphs} of them graphs"
    print(f"{audit.gpu}: {counted}; buffers {audit.arena_bytes / 1e6:.1f} MB; {steady}\n{HEADER}")
    for program in audit.programs:
        print(program_line(program))
        if detail:
            print("\n".join(op_lines(program)))


def plan(args: argparse.Namespace, source: loading.Source) -> dict[str, Any]:
    """Floors by the null backend, where there is no GPU to capture on."""
    hw = find_hardware(args.hardware)
    rows = args.max_num_batched_tokens or loading.BATCHED_TOKENS
    sizes = args.sizes or fit_sizes(rows, args.cudagraph_capture_sizes)
    steps = plan_buckets(source.target, 1, sizes, args.ctx, hw, streams=args.streams)
    drafts = [plan_draft(source.drafter, source.target, 1, args.ctx, hw, streams=args.streams)] if source.drafter else []
    found = [("step", step.rows, step) for step in steps] + [("draft", args.streams, step) for step in drafts]
    return {"planned": True, "hardware": hw.name, "programs": [_planned(*one, args.detail) for one in found]}


def _planned(kind: str, rows: int, floor: StepFloor, detail: bool) -> dict[str, Any]:
    print(f"{f'{kind} {rows}':<18}" + _numbers(None, floor.cost.bytes, floor.cost.flops, floor.floor_us, None))
    ops = [
        {"op": row.op, "dims": row.dims, "calls": row.count, "bytes": row.cost.bytes, "flops": row.cost.flops, "floor_us": row.floor_us}
        for row in floor.table
    ]
    for op in sorted(ops, key=lambda op: -op["floor_us"]) if detail else ():
        print(f"  {op['op']:<16}" + _numbers(None, op["bytes"], op["flops"], op["floor_us"], None) + f"  {op['calls']} x {op['dims']}")
    return {"kind": kind, "rows": rows, "floor_us": floor.floor_us, "ops": ops}


def write_dots(worker: CudaWorker, folder: Path) -> int:
    """A file for each program; how many."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = list(worker.programs())
    for program in programs:
        (folder / f"{program.name.replace(' ', '-')}.dot").write_text(dot(program), encoding="utf-8")
    return len(programs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        source, speculative = open_source(args)
        found, why = find_gpu()
        if found:
            worker = open_worker(args, source, speculative)
            pages, vocab = worker.limits.num_pages, worker.limits.vocab_size
            probe = Probe(min(args.streams, args.max_num_seqs), args.ctx, vocab, pages, worker.limits.page_size)
            audit = worker.audit(probe, args.repeats, sizes=args.sizes)
            print_audit(audit, args.detail)
            report = audit.as_json() | {"ctx": args.ctx, "streams": args.streams}
        else:
            print(
                f"{why}: nothing is captured. PLANNED by the null backend for one {args.hardware}; times are floors, not measured\n{HEADER}"
            )
            report = plan(args, source)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    if args.dot and found:
        print(f"{write_dots(worker, args.dot)} graphs written to {args.dot}")
    elif args.dot:
        print("--dot: no graphs without a GPU; nothing was written")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
