"""Samples of bench_serve to figures, records and tables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from tools.bench_targets import Sample

SCHEMA = "bench_serve/1"
ROOT = Path(__file__).resolve().parents[1]
BASELINE = "none"
_TABLE_KEYS = {"method", "temperature", "concurrency", "tokens_per_s_p50", "speedup", "acceptance_length", "acceptance_by_depth", "ttft_ms"}
_TABLE_KEYS |= {"tpot_ms", "same_text", "failed", "cpu", "threads", "date", "commit", "dirty", "cmd"}


@dataclass(slots=True)
class Cell:
    """All samples of one method at one temperature and concurrency, block by block."""

    method: str
    temperature: float
    concurrency: int
    samples: list[Sample] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)  # one a block
    block_tokens: list[int] = field(default_factory=list)

    def add(self, samples: Sequence[Sample], wall_s: float) -> None:
        self.samples += samples
        self.wall_s.append(wall_s)
        self.block_tokens.append(sum(sample.tokens for sample in samples))

    @property
    def tokens_per_s(self) -> float:
        return sum(self.block_tokens) / sum(self.wall_s) if self.wall_s else 0.0

    def rates(self) -> NDArray[np.float64]:
        """Tokens/s of each block."""
        rates: NDArray[np.float64] = np.array(self.block_tokens) / np.maximum(np.array(self.wall_s), 1e-9)
        return rates

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps, over all speculative steps; None without any."""
        steps = sum(len(sample.accepted) for sample in self.samples)
        return 1 + sum(sum(sample.accepted) for sample in self.samples) / steps if steps else None

    def acceptance_by_depth(self) -> list[float]:
        """Entry d: share of speculative steps that accepted d + 1 drafts or more."""
        accepted = np.array([count for sample in self.samples for count in sample.accepted], np.int64)
        return [float((accepted > depth).mean()) for depth in range(int(accepted.max(initial=0)))]

    def speedup(self, baseline: Cell | None) -> dict[str, float] | None:
        """Tokens/s over the baseline's, block by block: p10, p50, p90; and of the totals.

        The median is the figure to quote: a stall of the machine moves the total, and only one block.
        """
        if baseline is None or not self.wall_s or not baseline.wall_s:
            return None
        both = min(len(self.wall_s), len(baseline.wall_s))
        p10, p50, p90 = np.percentile(self.rates()[:both] / np.maximum(baseline.rates()[:both], 1e-9), (10, 50, 90))
        return {"total": self.tokens_per_s / max(baseline.tokens_per_s, 1e-9), "p10": float(p10), "p50": float(p50), "p90": float(p90)}

    def same_text(self, baseline: Cell | None) -> tuple[int, int] | None:
        """(answers equal to the baseline's, answers compared)."""
        if baseline is None:
            return None
        pairs = list(zip(self.samples, baseline.samples, strict=False))
        return sum(ours.text == theirs.text for ours, theirs in pairs), len(pairs)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 in milliseconds, of values in seconds."""
    if not values:
        return {}
    return {f"p{q}": round(float(np.percentile(values, q)) * 1e3, 3) for q in (50, 90, 99)}


def record_of(cell: Cell, baseline: Cell | None, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the results file; the same keys whatever the method."""
    speedup, same = cell.speedup(baseline), cell.same_text(baseline)
    length = cell.acceptance_length
    return {
        "schema": SCHEMA,
        "case": f"{cell.method} T={cell.temperature:g} c={cell.concurrency}",
        "method": cell.method,
        "temperature": cell.temperature,
        "concurrency": cell.concurrency,
        "requests": len(cell.samples),
        "failed": sum(sample.error is not None for sample in cell.samples),
        "tokens": sum(cell.block_tokens),
        "wall_s": round(sum(cell.wall_s), 3),
        "tokens_per_s": round(cell.tokens_per_s, 3),
        "tokens_per_s_p50": round(float(np.median(cell.rates())), 3) if cell.wall_s else 0.0,
        "speedup": speedup and {name: round(value, 3) for name, value in speedup.items()},
        "acceptance_length": length and round(length, 3),
        "acceptance_by_depth": [round(share, 4) for share in cell.acceptance_by_depth()],
        "steps": sum(len(sample.accepted) for sample in cell.samples),
        "nodes": sum(sum(sample.drafted) for sample in cell.samples),
        "ttft_ms": percentiles([sample.first_s for sample in cell.samples if sample.tokens]),
        "tpot_ms": percentiles([value for sample in cell.samples if (value := sample.per_token_s) is not None]),
        "same_text": same and list(same),
        **provenance,
    }


def provenance_of(cmd: Sequence[str], threads: int, **more: Any) -> dict[str, Any]:
    """Where the figures come from: command, commit, date, machine."""
    return {
        "cmd": " ".join(cmd),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
        **more,
    }


def _git(*args: str) -> str:
    found = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine()
    )


def live_table(records: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The figures so far, for the terminal; rates and speed-ups are medians over blocks of prompts."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in (
        "method",
        "T",
        "streams",
        "tokens/s",
        "speed-up",
        "p10–p90",
        "tokens/step",
        "TTFT p50",
        "TPOT p50",
        "TPOT p99",
        "same text",
    ):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for record in records:
        speedup, same = record["speedup"], record["same_text"]
        table.add_row(
            record["method"],
            f"{record['temperature']:g}",
            str(record["concurrency"]),
            f"{record['tokens_per_s_p50']:.1f}",
            f"{speedup['p50']:.2f}×" if speedup else "",
            f"{speedup['p10']:.2f}–{speedup['p90']:.2f}" if speedup else "",
            f"{record['acceptance_length']:.2f}" if record["acceptance_length"] else "1.00",
            _ms(record["ttft_ms"], "p50"),
            _ms(record["tpot_ms"], "p50"),
            _ms(record["tpot_ms"], "p99"),
            f"{same[0]}/{same[1]}" if same else "",
        )
    return table


def _ms(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.0f} ms" if name in values else ""


def markdown_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The README's table, from the records of one run, with the line that says where they come from."""
    lines = [
        "| method | temperature | streams | tokens/s | speed-up | tokens a step | accepted at depth 1, 2, 3 … | same text |",
        "|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for r in records:
        depths = " ".join(f"{share:.2f}" for share in r["acceptance_by_depth"])
        speedup = f"{r['speedup']['p50']:.2f}×" if r["speedup"] else "–"
        same = f"{r['same_text'][0]}/{r['same_text'][1]}" if r["same_text"] else "–"
        length = f"{r['acceptance_length']:.2f}" if r["acceptance_length"] else "1.00"
        figures = (
            r["method"],
            f"{r['temperature']:g}",
            r["concurrency"],
            f"{r['tokens_per_s_p50']:.1f}",
            speedup,
            length,
            depths or "–",
            same,
        )
        lines.append("| " + " | ".join(map(str, figures)) + " |")
    if records:
        r = records[0]
        dirty = ", uncommitted changes" if r["dirty"] else ""
        lines += ["", f"{r['cpu']}, {r['threads']} threads, {r['date'][:10]}, commit {r['commit']}{dirty}: `{r['cmd']}`"]
    return "\n".join(lines)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of this schema in a results file. Raises ValueError naming the line."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
        if record.get("schema") != SCHEMA:
            continue
        missing = _TABLE_KEYS - record.keys()
        if missing:
            raise ValueError(f"{path}, line {number}: no {', '.join(sorted(missing))}; measure anew")
        records.append(record)
    return records
