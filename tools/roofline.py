"""Floors of a model before any weight is loaded: memory per rank, context that fits, least time of a step.

The model's own forward is walked at full size through the null backend (no memory, no GPU), and every
op is priced at the bytes and flops that any implementation must pay. Read a row as: "no engine on
this machine can run a step of M rows faster than this". See runtime/planning.py for the assumptions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich import box
from rich.console import Console
from rich.table import Table

from model import dflash, kimi_k26
from model.stages import stages_of
from runtime.hw import HARDWARE, Hardware, find_hardware
from runtime.ops import expected_experts
from runtime.planning import NET_BPS, NET_US, RankMemory, StepFloor, memory_of_stages, plan_buckets, plan_draft
from runtime.reserve import ARCHITECTURES, DEFAULTS, Reserved, reserve

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BUILT_IN = {"kimi-k26": ROOT / "model/configs/kimi-k26.json", "demo": ROOT / "model/demo/config.json"}
DRAFTERS = {"kimi-k26": ROOT / "model/configs/kimi-k26-dflash.json", "demo": ROOT / "model/demo/drafter/config.json"}

# Columns of the step table: a heading and the ops it sums.
PARTS: dict[str, tuple[str, ...]] = {
    "experts": ("moe_w4",),
    "linear": ("linear", "silu_mul"),
    "attn": ("mla_latent", "mla_query", "tree_mla", "mla_value", "block_attention", "head_norm_rope", "kv_write"),
    "router": ("route",),
    "head": ("gather_rows", "linear_f32", "sample", "top_logprobs"),
}
# Rows of the memory table below the weights.
RESERVED = {
    "buffers and scratch": "buffers", "  expanded keys of chunks": "chunks", "places for peers": "peers", "plans": "plans",
    "private pages of trees": "private", "host, mapped": "mapped", "host, while loading": "pinned",
}  # fmt: skip
EPILOG = """\
examples
  tools/roofline.py                                   Kimi K2.6 on H200, TP 1 2 4 8, every default bucket, empty context
  tools/roofline.py --hw rtx-pro-6000 --tp 8 --ctx 32768 --streams 10
  tools/roofline.py --hw h100 --tp 8 --pp 2           two hosts, which hold what one does not
  tools/roofline.py --config demo --hw cpu --tp 1     the small model in model/demo
  tools/roofline.py --config /models/Kimi-K2.6 --detail --buckets 1 8 64
  tools/roofline.py --json | jq '.steps[] | select(.tp == 8) | {rows, floor_us}'

reading the tables
  M         rows of a step: streams x (draft nodes + 1), or the tokens of a prompt chunk
  distinct  expected distinct experts of a layer under uniform routing; real tokens share more: pass --distinct to set it
  buffers   and scratch, as steps and drafts record them (to 1,024 rows, 64 streams); CUDA's context, NCCL and graphs come on top
  floor     device work alone, in milliseconds; the columns after it split it by part
  link      collectives on top: latency and bytes of the machine's link, not overlapped with anything
  est       estimate of a whole step: floor / --share + link; the share is what measured steps reach, not a law
  tok/s     M / (floor + link): what M rows a step would give if every row were a token kept
"""


@dataclass(frozen=True)
class Report:
    """All that the tables show, for --json as well."""

    config: kimi_k26.Config
    hw: Hardware
    ctx: int
    streams: int
    distinct: float | None
    utilisation: float
    share: float
    memory: list[RankMemory]
    steps: dict[int, list[StepFloor]]
    drafts: dict[int, StepFloor]
    planned_s: float
    stages: int = 1
    reserved: list[Reserved] | None = None  # of each entry of memory; None: a machine without kernels

    def tokens_that_fit(self, at: int) -> int:
        more = self.reserved[at].device_bytes if self.reserved else None
        return self.memory[at].tokens_that_fit(self.hw, self.utilisation, more)


def read_config(text: str) -> tuple[kimi_k26.Config, dflash.Config | None]:
    """A built-in name, a folder with config.json (and perhaps drafter/config.json), or a JSON file."""
    path = BUILT_IN.get(text, Path(text))
    drafter = DRAFTERS.get(text, path / "drafter" / "config.json")
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"--config {text}: neither a built-in name ({', '.join(BUILT_IN)}), a folder with config.json, nor a JSON file")
    config = kimi_k26.Config.from_json(_read_json(path), str(path))
    draft = dflash.Config.from_json(_read_json(drafter), str(drafter)) if drafter.is_file() else None
    return config, draft


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    return read


def make_report(args: argparse.Namespace) -> Report:
    config, draft = read_config(args.config)
    hw = find_hardware(args.hw)
    sizes = args.tp or [n for n in (1, 2, 4, 8) if config.heads % n == 0]
    start = time.perf_counter()
    memory = [rank for tp in sizes for rank in memory_of_stages(config, tp, args.pp, draft)]
    given = {"streams": args.streams, "distinct": args.distinct, "stages": args.pp, "taps": draft.taps if draft and args.pp > 1 else ()}
    steps = {tp: plan_buckets(config, tp, args.buckets, args.ctx, hw, **given) for tp in sizes}
    drafts = {tp: plan_draft(draft, config, tp, args.ctx, hw, streams=args.streams) for tp in sizes} if draft else {}
    planned_s = time.perf_counter() - start
    reserved = _reserved(config, sizes, draft, hw, args) if hw.name in ARCHITECTURES else None
    shown = (args.ctx, args.streams, args.distinct, args.memory_utilization, args.share)
    return Report(config, hw, *shown, memory, steps, drafts, planned_s, args.pp, reserved)


def _reserved(
    config: kimi_k26.Config, sizes: Sequence[int], draft: dflash.Config | None, hw: Hardware, args: argparse.Namespace
) -> list[Reserved]:
    """As memory_of_stages: what each rank holds besides weights and cache."""
    engine = replace(DEFAULTS, batch_invariant=args.batch_invariant)
    stages = stages_of(config.layers, args.pp, draft is not None) if args.pp > 1 else [None]
    return [reserve(config, tp, draft, hw, engine, stage) for tp in sizes for stage in stages]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def memory_table(report: Report) -> Table:
    table = _table(f"memory per rank, GB (of {report.hw.memory_bytes / 1e9:.1f})")
    table.add_column("weights")
    for memory in report.memory:
        stage = f" stage {memory.stage}" if report.stages > 1 else ""
        table.add_column(f"TP {memory.tp}{stage}", justify="right")
    for kind in dict.fromkeys(kind for m in report.memory for kind in m.weights):
        table.add_row(kind, *(f"{m.weights.get(kind, 0) / 1e9:.2f}" for m in report.memory))
    table.add_section()
    table.add_row("all weights", *(f"{m.weight_bytes / 1e9:.1f}" for m in report.memory))
    for name, part in RESERVED.items() if report.reserved else ():
        table.add_row(name, *(f"{getattr(r, part) / 1e9:.2f}" for r in report.reserved or ()))
    table.add_row("cache, bytes a token", *(f"{m.kv_token_bytes:,}" for m in report.memory))
    fits = [report.tokens_that_fit(at) for at in range(len(report.memory))]
    table.add_row(f"tokens that fit in {report.utilisation:.0%}", *(f"{n:,}" if n else "does not fit" for n in fits))
    return table


def step_table(report: Report, tp: int) -> Table:
    stages = f" through {report.stages} stages" if report.stages > 1 else ""
    table = _table(f"one step at TP {tp}{stages}, ms ({report.streams} stream(s) of {report.ctx:,} committed tokens)")
    for heading in ("M", "distinct", "GB", "floor", *PARTS, "other", "link", "est", "tok/s"):
        table.add_column(heading, justify="right")
    for step in report.steps[tp]:
        distinct = report.distinct or expected_experts(report.config.experts, report.config.top_k, step.rows)
        table.add_row(
            str(step.rows), f"{distinct:.0f}", *_step_cells(step, report.share), f"{step.rows / (step.floor_us + step.link_us) * 1e6:,.0f}"
        )
    if tp in report.drafts:
        table.add_section()
        table.add_row("draft", "", *_step_cells(report.drafts[tp], report.share), "")
    return table


def estimate_us(step: StepFloor, share: float) -> float:
    """A step that reaches that share of its floor, and waits for the link."""
    return step.floor_us / share + step.link_us


def _step_cells(step: StepFloor, share: float) -> list[str]:
    by_op = step.by_op()
    parts = [sum(by_op.get(op, 0.0) for op in ops) for ops in PARTS.values()]
    values = [step.cost.bytes / 1e9, step.floor_us / 1e3, *(p / 1e3 for p in parts), (step.floor_us - sum(parts)) / 1e3]
    values += [step.link_us / 1e3, estimate_us(step, share) / 1e3]
    return [f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values]


def detail_table(report: Report, tp: int, step: StepFloor) -> Table:
    table = _table(f"ops of a step of {step.rows} rows at TP {tp}")
    for heading in ("op", "size", "calls", "MB", "GFLOP", "bound", "floor µs", "share"):
        table.add_column(heading, justify="left" if heading in ("op", "size", "bound") else "right")
    for row in sorted(step.table, key=lambda r: -r.floor_us):
        bound = "link" if row.is_link else "read" if row.cost.read_us(report.hw) >= row.cost.compute_us(report.hw) else "compute"
        share = "" if row.is_link else f"{row.floor_us / step.floor_us:.1%}"
        cells = (f"{row.cost.bytes / 1e6:,.1f}", f"{row.cost.flops / 1e9:,.2f}", bound, f"{row.floor_us:,.1f}", share)
        table.add_row(row.op, row.dims, str(row.count), *cells)
    return table


def as_json(report: Report) -> dict[str, Any]:
    def step_of(tp: int, step: StepFloor) -> dict[str, Any]:
        rows = [
            {"op": r.op, "dims": r.dims, "count": r.count, "flops": r.cost.flops, "bytes": r.cost.bytes, "floor_us": r.floor_us}
            for r in step.table
        ]
        total = {"tp": tp, "rows": step.rows, "bytes": step.cost.bytes, "flops": step.cost.flops}
        times = {"floor_us": step.floor_us, "link_us": step.link_us, "estimate_us": estimate_us(step, report.share)}
        return {**total, **times, "ops": rows}

    return {
        "hardware": asdict(report.hw),
        "ctx": report.ctx,
        "streams": report.streams,
        "distinct": report.distinct,
        "share": report.share,
        "planned_s": report.planned_s,
        "memory": [
            {"tp": m.tp, "stage": m.stage, "weights": dict(m.weights), "weight_bytes": m.weight_bytes, "kv_token_bytes": m.kv_token_bytes,
             "tokens_that_fit": report.tokens_that_fit(at), "reserved": _bytes_of(report.reserved[at]) if report.reserved else None}
            for at, m in enumerate(report.memory)
        ],
        "steps": [step_of(tp, step) for tp, steps in report.steps.items() for step in steps],
        "drafts": [step_of(tp, step) for tp, step in report.drafts.items()],
    }  # fmt: skip


def _bytes_of(reserved: Reserved) -> dict[str, int]:
    return {part: getattr(reserved, part) for part in ("device_bytes", *RESERVED.values())}


def print_tables(report: Report, detail: bool, console: Console) -> None:
    hw, c = report.hw, report.config
    routing = f"{report.distinct:g} distinct experts in every layer" if report.distinct else "experts drawn uniformly and independently"
    console.print(f"[bold]{c.layers} layers, {c.experts} experts top-{c.top_k}[/bold] on {hw.name}: {hw.read_bps / 1e12:g} TB/s, "
                  f"{hw.tensor_flops / 1e12:g} TFLOP/s, link {hw.link_bps / 1e9:g} GB/s and {hw.link_us:g} µs ({hw.source})")  # fmt: skip
    console.print(f"Assumed: {routing}; each operand moved once; ops one after another, reading and computing overlapped within an op; "
                  "the latent path, the router, the latent cache and the drafter's merging of taps replicated on every rank.")  # fmt: skip
    if report.stages > 1:
        console.print(f"Stages go one after another; {NET_BPS / 1e9:g} GB/s and {NET_US:g} µs between their hosts are assumed.")
    console.print(memory_table(report))
    for tp, steps in report.steps.items():
        console.print(step_table(report, tp))
        for step in steps if detail else ():
            console.print(detail_table(report, tp, step))
    console.print(f"planned in {report.planned_s * 1e3:.0f} ms")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    config_help = f"{' | '.join(BUILT_IN)} | a checkpoint folder | a config.json (default: kimi-k26)"
    parser.add_argument("--config", default="kimi-k26", help=config_help)
    parser.add_argument("--hw", default="h200", help=f"one of {', '.join(HARDWARE)} (default: h200)")
    parser.add_argument("--tp", type=int, nargs="+", help="tensor-parallel sizes (default: 1 2 4 8)")
    pp_help = "stages of a pipeline, each of as many ranks on a host of its own; the link between is an assumption (default: 1)"
    parser.add_argument("--pp", type=int, default=1, metavar="P", help=pp_help)
    parser.add_argument("--buckets", type=int, nargs="+", default=list(DEFAULT_BUCKETS), metavar="M", help="rows of a step")
    parser.add_argument("--ctx", type=int, default=0, help="committed tokens of each stream (default: 0)")
    parser.add_argument("--streams", type=int, default=1, help="sequences that share a step (default: 1)")
    parser.add_argument("--distinct", type=float, help="distinct experts hit in a layer, instead of the uniform expectation")
    parser.add_argument("--memory-utilization", type=float, default=0.9, help="share of device memory for weights and cache (default: 0.9)")
    share_help = "share of the floor that steps reach, for the estimate (default: 0.75; measured shares: tools/results/step_*.jsonl)"
    parser.add_argument("--share", type=float, default=0.75, help=share_help)
    parser.add_argument("--batch-invariant", action="store_true", help="memory as the engine's option of that name has it")
    parser.add_argument("--detail", action="store_true", help="one more table for each bucket: every op with its size and what binds it")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if min(args.buckets) < 1 or args.streams < 1 or not (0 < args.memory_utilization <= 1 and 0 < args.share <= 1):
        parser.error("--buckets and --streams start at 1; --memory-utilization and --share lie in (0, 1]")
    try:
        report = make_report(args)
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(as_json(report), indent=1))
    else:
        # 100 columns hold every table; a pipe would get 80 and cut them
        print_tables(report, args.detail, Console() if sys.stdout.isatty() else Console(width=100))
    return 0


if __name__ == "__main__":
    sys.exit(main())
