"""The README's tables of H200s: attention, products, whole steps, and two ranks, from the records under tools/results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.kernels_cu._build import digest
from runtime.kernels_cu.linear_choice import source_digests
from tools.bench_mla import CASES

RESULTS = Path(__file__).resolve().parent / "results"
PRODUCTS = {"square": "7168 × 7168", "qkv_a": "q_a + kv_a", "q_b": "q_b", "o": "o_proj", "router": "router", "head": "lm_head"}
PRODUCT_ROWS = (1, 8, 16, 64, 256)
Record = dict[str, Any]


def read(name: str) -> list[Record]:
    """Records of a file, oldest first."""
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def provenance(row: Record) -> str:
    """What a table's figures were made with."""
    return f"{row['gpu']}, driver {row['driver']}, {row['date']}, commit {row['commit']}: `{row['cmd']}`"


def mla_table() -> str:
    """Attention over the latent cache with a tree's mask: the last record of each case, beside the fastest peers."""
    last = {f"{r['heads']}x{r['streams']}x{r['q']}x{r['ctx']}": r for r in read("mla_h200.jsonl")}
    lines = [
        "| heads × streams × rows × context | µs | floor µs | TFLOP/s | best causal peer µs | best tree-masked peer µs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (causal, tree, *_) in CASES.items():
        r = last[name]
        peers = " | ".join(f"{p:g}" if p is not None else "–" for p in (causal, tree))
        lines.append(f"| {name.replace('x', ' × ')} | {_us(r['us'])} | {_us(r['floor_us'])} | {r['tflops']:.0f} | {peers} |")
    return "\n".join([*lines, "", provenance(last[next(reversed(CASES))])])


def linear_table() -> str:
    """bf16 products: the faster of the kernels that were timed, µs and share of the read rate (of the product rate where that binds)."""
    last = {(r["name"], r["M"], r["kernel"]): r for r in read("linear_h200.jsonl") if r["tp"] == 1 and "invariant" not in r["kernel"]}
    changed = {r["kernel"] for r in last.values() if r["kernel"] in ("skinny", "stream") and r["src"] not in source_digests(r["kernel"])}
    lines = ["| product | " + " | ".join(f"M = {m}" for m in PRODUCT_ROWS) + " |", "|---|" + "---:|" * len(PRODUCT_ROWS)]
    for name, shown in PRODUCTS.items():
        cells = []
        for m in PRODUCT_ROWS:
            best = min((r for (n, rows, _), r in last.items() if (n, rows) == (name, m)), key=lambda r: float(r["us"]))
            cells.append(f"{_us(best['us'])} ({best['share']:.2f}{'' if best['kernel'] == 'cublasLt' else ' *'})")
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    note = "\\* our kernel; without it cuBLASLt was the faster. "
    if changed:
        note += f"Changed since and not yet timed again, so not chosen until it is: {', '.join(f'linear_{k}' for k in sorted(changed))}. "
    return "\n".join([*lines, "", note + provenance(next(reversed(last.values())))])


def step_table() -> str:
    """Whole steps of K2.6's layers as captured graphs, random weights: the last run of each (layers, tp)."""
    runs: dict[tuple[int, int], dict[int, Record]] = {}
    for r in read("step_h200.jsonl"):
        if "ms" in r and "M" in r:
            rows = runs.setdefault((r["layers"], r["tp"]), {})
            if rows and next(iter(rows.values()))["cmd"] != r["cmd"]:
                rows.clear()
            rows[r["M"]] = r
    lines = [
        "| layers × TP | M | step ms | floor ms | share | host µs | launches |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (layers, tp), rows in runs.items():
        for m, r in sorted(rows.items()):
            name = f"{layers} × {tp}"
            lines.append(
                f"| {name} | {m} | {r['ms']:.3f} | {r['floor_ms']:.3f} | {r['share']:.2f} | {r['host_us']:.0f} | {r['launches']} |"
            )
    return "\n".join([*lines, "", *(provenance(next(iter(rows.values()))) + "  " for rows in runs.values())])


def ranks_table() -> str:
    """Sums over two ranks, alone and with the residual and norm after them, then steps of two ranks: the last record of each."""
    sums = {r["M"]: r for r in read("allreduce_h200x2.jsonl")}
    steps = {r["M"]: r for r in read("step_h200x2.jsonl") if not r["cut_latent"]}
    lines = ["| M | sum µs | NCCL µs | sum, residual, norm µs | the same by two kernels µs |", "|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {m} | {r['ours_us']:.2f} | {r['nccl_us']:.2f} | {r['fused_us']:.2f} | {r['apart_us']:.2f} |" for m, r in sorted(sums.items())
    ]
    lines += ["", "| M | step ms | floor ms | share | its sums µs |", "|---:|---:|---:|---:|---:|"]
    for m, r in sorted(steps.items()):
        floor_ms = r["floor_us"] / 1e3
        lines.append(f"| {m} | {r['ms']:.3f} | {floor_ms:.3f} | {floor_ms / r['ms']:.2f} | {_us(r['comm_us'])} |")
    last = next(reversed(sums.values()))
    stale = "" if last["src"] == digest("all_reduce.cu") else "all_reduce.cu has changed since and is not timed again yet. "
    return "\n".join([*lines, "", f"{stale}{provenance(last)}  ", provenance(next(reversed(steps.values())))])


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
