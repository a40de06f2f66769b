"""What tools/bench_step.py found: tables, the stacked plot, records, a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

STAGES: dict[str, tuple[str, ...]] = {
    "experts": ("moe_w4", "route"),
    "products": ("linear", "silu_mul"),
    "attention": ("mla_latent", "mla_query", "tree_mla", "mla_value", "split_chunks", "chunk_attention", "kv_move"),
    "head": ("gather_rows", "linear_f32", "sample"),
}
COLOURS = ("#2f5d8a", "#7fa7c9", "#d9a441", "#8c6bb1", "#c9c9c9")


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op in a step: microseconds of all its launches (None: planned), the floor of them, how many."""

    us: float | None
    floor_us: float
    launches: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step of M rows over `streams` sequences. us, host_us, launches: None where it was only planned. experts: distinct ones of a
    layer, counted; None: expected."""

    M: int
    streams: int
    us: float | None
    floor_us: float
    host_us: float | None
    launches: int | None
    ops: Mapping[str, OpTime]
    experts: float | None = None

    @property
    def share(self) -> float | None:
        return self.floor_us / self.us if self.us else None

    def stages(self) -> dict[str, float]:
        """Milliseconds by stage, measured where that was done, else floors; what no stage names is "rest"."""
        found = dict.fromkeys((*STAGES, "rest"), 0.0)
        for name, op in self.ops.items():
            stage = next((stage for stage, ops in STAGES.items() if name in ops), "rest")
            found[stage] += (op.floor_us if op.us is None else op.us) / 1e3
        return found

    def as_json(self) -> dict[str, Any]:
        ops = {name: [_rounded(op.us, 2), round(op.floor_us, 2), op.launches] for name, op in self.ops.items()}
        return {
            "M": self.M, "streams": self.streams, "ms": _rounded(self.us, 1, 1e3), "floor_ms": round(self.floor_us / 1e3, 5),
            "share": _rounded(self.share, 4), "host_us": _rounded(self.host_us, 1), "launches": self.launches,
            "experts": _rounded(self.experts, 1), "ops_us_floor_launches": ops,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt in chunks: milliseconds of all of them, host included."""

    prompt: int
    chunk: int
    ms: float
    floor_ms: float

    @property
    def tok_s(self) -> float:
        return self.prompt / self.ms * 1e3

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt, "chunk": self.chunk, "ms": round(self.ms, 3), "floor_ms": round(self.floor_ms, 3),
            "share": round(self.floor_ms / self.ms, 4), "tok_s": round(self.tok_s, 1),
        }  # fmt: skip


def _rounded(value: float | None, digits: int, divisor: float = 1.0) -> float | None:
    """Rounded before it is divided: 1 digit of microseconds are 4 of milliseconds."""
    return None if value is None else round(value, digits) / divisor


def print_steps(steps: Sequence[Step], by_op: bool, console: Console | None = None) -> None:
    """One line a bucket; by_op: one more table for each."""
    out = console or Console(width=120)
    table = Table(title="steps, ms", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("M", "streams", "experts", "ms", "floor", "share", *STAGES, "rest", "host µs", "launches"):
        table.add_column(heading, justify="right")
    for step in steps:
        measured = ["planned", _ms(step.floor_us), "–"] if step.us is None else [_ms(step.us), _ms(step.floor_us), f"{step.share:.3f}"]
        parts = [f"{ms:.3f}" for ms in step.stages().values()]
        host = ["–", "–"] if step.host_us is None else [f"{step.host_us:.0f}", str(step.launches)]
        experts = "–" if step.experts is None else f"{step.experts:.0f}"
        table.add_row(str(step.M), str(step.streams), experts, *measured, *parts, *host)
    out.print(table)
    for step in steps if by_op else ():
        detail = Table(title=f"M = {step.M}, µs", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("op", "launches", "µs", "floor", "share"):
            detail.add_column(heading, justify="right" if heading != "op" else "left")
        for name, op in step.ops.items():
            share = f"{op.floor_us / op.us:.3f}" if op.us and op.floor_us else "–"
            detail.add_row(name, str(op.launches), "planned" if op.us is None else f"{op.us:.1f}", f"{op.floor_us:.1f}", share)
        out.print(detail)


def print_prefill(found: Sequence[Prefill], console: Console | None = None) -> None:
    table = Table(title="prompts", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("tokens", "chunk", "ms", "floor", "share", "tok/s"):
        table.add_column(heading, justify="right")
    for p in found:
        table.add_row(str(p.prompt), str(p.chunk), f"{p.ms:.1f}", f"{p.floor_ms:.1f}", f"{p.floor_ms / p.ms:.3f}", f"{p.tok_s:,.0f}")
    (console or Console(width=120)).print(table)


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}"


def draw(steps: Sequence[Step], path: Path, title: str) -> None:
    """Stacked times by stage over M; the whole step and its floor as lines. Needs the extra `plot`."""
    from tools.plot import _pyplot, save

    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    rows = [step.M for step in steps]
    parts = [step.stages() for step in steps]
    axis.stackplot(rows, *([p[name] for p in parts] for name in parts[0]), labels=list(parts[0]), colors=COLOURS)
    if all(step.us is not None for step in steps):
        axis.plot(rows, [(step.us or 0.0) / 1e3 for step in steps], color="black", linewidth=1.4, label="the step")
    axis.plot(rows, [step.floor_us / 1e3 for step in steps], color="#b03a2e", linestyle="--", linewidth=1.2, label="floor")
    axis.set(xscale="log", xlabel="M, rows of a step", ylabel="ms", title=title, xlim=(rows[0], max(rows[-1], rows[0] + 1)))
    axis.set_xticks(rows[::2], [str(m) for m in rows[::2]])
    axis.minorticks_off()
    axis.legend(loc="upper left", frameon=False)
    save(figure, path)
    pyplot.close(figure)


def write_trace(path: Path, programs: Iterable[Any], steps: Sequence[Step]) -> None:
    """Chrome trace events: a process a bucket, its launches in order, each as long as its op's mean launch. Not a recording: gaps
    and overlaps of the real step do not show; the span above has its true length."""
    events: list[dict[str, Any]] = []
    by_rows = {step.M: step for step in steps if step.us is not None}
    for program in programs:
        step = by_rows.get(program.rows)
        if step is None or program.kind != "step" or program.out_rows != program.rows:
            continue
        pid, at = program.rows, 0.0
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"M = {program.rows}"}})
        args = {"floor_us": step.floor_us, "share": step.share}
        events.append({"ph": "X", "name": "step", "pid": pid, "tid": 1, "ts": 0.0, "dur": step.us, "args": args})
        for record in program.records:
            op = step.ops.get(record.op) or step.ops.get("moe_w4")
            duration = (op.us or 0.0) / op.launches if op else 0.0
            launch = " ".join(str(record.run).split())
            events.append({"ph": "X", "name": record.op, "pid": pid, "tid": 2, "ts": at, "dur": duration, "args": {"launch": launch}})
            at += duration
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}), encoding="utf-8")
