"""Writes the README's tables from the records under tools/results: `python tools/report.py`, or `--check` to compare only."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.bench_report import markdown_table, read_records
from tools.gpu_report import linear_table, mla_table, ranks_table, step_table

README = ROOT / "README.md"
RESULTS = ROOT / "tools" / "results"
SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
Record = dict[str, Any]


def serve_table() -> str:
    """Speculation on the demo model: the last run of tools/bench_serve.py."""
    records = read_records(RESULTS / "bench_serve.jsonl")
    run = (records[-1]["cmd"], records[-1]["commit"])
    return markdown_table([r for r in records if (r["cmd"], r["commit"]) == run])


def moe_table() -> str:
    """The INT4 expert layer on one H200, last recorded commit, beside the fastest peer of each row; then its shards."""
    rows = [json.loads(line) for line in (RESULTS / "moe_h200.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [r for r in rows if r["shape"] == "kimi-k26" and r["routing"] == "uniform"]
    commit = [r["commit"] for r in rows if "peer" not in r][-1]
    ours = {(r["tp"], r["M"]): r for r in rows if r.get("commit") == commit}
    peers: dict[tuple[int, int], Record] = {}
    for r in rows:
        key = (r["tp"], r["M"])
        if "peer" in r and (key not in peers or r["ms"] < peers[key]["ms"]):
            peers[key] = r
    lines = [
        "| M | µs | sustained µs | TB/s | share of read rate | TFLOP/s | best peer µs (TB/s) | TB/s gain |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for m in SHOWN_ROWS:
        r, p = ours[1, m], peers[1, m]
        lines.append(
            f"| {m} | {_us(r['ms'])} | {_us(r['ms_sustained'])} | {r['tb_s']:.2f} | {r['share']:.2f} | {r['tflops']:.0f} "
            f"| {_us(p['ms'])} ({p['tb_s']:.2f}) | {r['tb_s'] / p['tb_s']:.2f} |"
        )
    shards = sorted({m for tp, m in ours if tp == 8} & {m for tp, m in ours if tp == 2})
    lines += ["", "| one rank's shard, µs | " + " | ".join(f"M = {m}" for m in shards) + " |", "|---|" + "---:|" * len(shards)]
    for tp in (2, 8):
        for name, source in ((f"TP {tp}", ours), ("best peer", peers)):
            lines.append(f"| {name} | " + " | ".join(_us(source[tp, m]["ms"]) for m in shards) + " |")
    first = ours[1, 1]
    lines += [
        "",
        f"{first['gpu']}, driver {first['driver']}, {first['date']}, commit {commit}, "
        f"read rate {first['read_tb_s']:.2f} TB/s: `{first['cmd']}`",
    ]
    return "\n".join(lines)


def _us(ms: float) -> str:
    us = ms * 1e3
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


BLOCKS: dict[str, Callable[[], str]] = {
    "bench_serve": serve_table, "moe": moe_table, "step": step_table, "mla": mla_table, "linear": linear_table, "ranks": ranks_table,
}  # fmt: skip


def render(text: str) -> str:
    """The page with every block between its marks made anew. Raises ValueError for a mark that is missing."""
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"README.md: the marks <!-- {name} --> … <!-- /{name} --> are missing")
        block = make()
        text = pattern.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tools/report.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table disagrees with its records")
    args = parser.parse_args(argv)
    old = README.read_text(encoding="utf-8")
    new = render(old)
    if args.check:
        print("README.md agrees with its records" if new == old else "README.md disagrees with tools/results: run python tools/report.py")
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    print("README.md: " + ", ".join(BLOCKS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
