#!/usr/bin/env python3
"""Times the INT4 MoE layer over M and finds the threshold of weight streaming.

    python tools/bench_moe.py                                  # Kimi K2.6, one GPU, uniform routing
    python tools/bench_moe.py --tp 8 --m 1,9,90,256,1024
    python tools/bench_moe.py --routing zipf:1 --json rows.jsonl --plot moe.svg

Weights are filled on the GPU in seconds. Each M is checked against plain kernels first: a wrong kernel gets no time. A
layer is routing from logits, sorting, both products, silu * up, the weighted sum and the shared expert's addition, in a
CUDA graph over rotating routings. ms is the median of the first replays after a cool-down, `sustained` the median from half
a second on. Share = bytes of the distinct experts / time / the best read rate of the same run.
Without a GPU it says so and prints the predicted curve.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.hw import HARDWARE, find_hardware
from tools.moe_report import Row, Shape, analyse, compare_published, draw, note_of, predicted_rows
from tools.tune import parse_shape

DEFAULT_M = "1,2,4,8,9,16,32,64,90,128,256,512,1024,2048,4096"
HEADER = f"{'M':>6}{'ms/call':>10}{'tok/s(MoE)':>12}{'us/token':>10}{'experts':>9}{'GB':>8}{'TB/s':>7}{'share':>7}{'TFLOP/s':>9}  note"


def format_row(row: Row, shape: Shape, read_bps: float, note: str) -> str:
    """One line of the table."""
    return (
        f"{row.M:6d}{row.ms:10.4f}{row.M / row.ms * 1e3:12.0f}{row.ms * 1e3 / row.M:10.2f}{row.experts:9.1f}{row.gb:8.3f}{row.tb_s:7.3f}"
        f"{row.tb_s * 1e12 / read_bps:7.3f}{shape.flops(row.M) / row.ms * 1e-9:9.1f}  {note}"
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="kimi-k26", help="a name, or H,I,E,k")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the expert width; one rank's shard is timed")
    parser.add_argument("--m", default=DEFAULT_M, help="row counts, comma-separated")
    parser.add_argument("--routing", default="uniform", help="uniform, zipf:s, or a .npy file of logits [calls, rows, E]")
    parser.add_argument("--json", type=Path, help="append a record a row")
    parser.add_argument("--resume", action="store_true", help="skip the rows that --json holds already")
    parser.add_argument("--plot", type=Path, help="write an SVG")
    parser.add_argument("--calls", type=int, help="routings in a graph (default: 24 to M = 16, 8 to 256, 4 above)")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--hardware", default="", help=f"for predictions and floors: {', '.join(HARDWARE)}")
    return parser.parse_args(arguments)


def has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def provenance(commit: str) -> dict[str, Any]:
    """What produced a record."""
    import cupy

    from runtime.kernels_cu._build import nvrtc_version
    from runtime.kernels_cu.moe_choice import source_digest

    root = Path(__file__).resolve().parents[1]
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "driver": driver_version(),
        "nvrtc": ".".join(map(str, nvrtc_version() or ())), "cupy": cupy.__version__, "commit": commit or found.stdout.strip() or "unknown",
        "src": source_digest(), "date": datetime.date.today().isoformat(), "cmd": " ".join(["python", *sys.argv]),
    }  # fmt: skip


def driver_version() -> str:
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip().split("\n")[0]


def finished_rows(path: Path | None, key: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Records in `path` of the same shape, shard and routing, by M."""
    if path is None or not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {r["M"]: r for r in records if "peer" not in r and all(r.get(k) == v for k, v in key.items())}


def measure(options: argparse.Namespace, shape: Shape, sizes: list[int]) -> tuple[list[Row], float]:
    """Times each M on the GPU; prints and records each row as it comes."""
    from tqdm import tqdm

    from runtime.kernels_cu.device import gpu_name
    from runtime.kernels_cu.moe_choice import choose_config
    from runtime.kernels_cu.moe_config import Dims
    from tools.moe_rig import MAX_ERROR, LayerCase, Rig, describe

    rig = Rig()
    read_bps = rig.read_bps()
    weights = rig.make_weights(Dims(1, shape.E, shape.H, shape.F, shape.k))
    source = provenance(options.commit)
    key = {"shape": options.shape, "tp": options.tp, "routing": options.routing, "gpu": source["gpu"]}
    known = finished_rows(options.json, key) if options.resume else {}
    print(f"{source['gpu']}, {weights.w13.nbytes + weights.w2.nbytes:.3e} bytes of weights, best read rate {read_bps * 1e-12:.3f} TB/s")
    print(HEADER)
    rows = []
    for m in tqdm(sizes, leave=False, disable=not sys.stderr.isatty()):
        if m in known:
            rows.append(Row(m, known[m]["ms"], known[m]["experts"], known[m]["gb"]))
            tqdm.write(format_row(rows[-1], shape, known[m]["read_tb_s"] * 1e12, "recorded"))
            continue
        case = LayerCase(rig, weights, m, options.routing, options.calls)
        config, why = choose_config(case.dims, gpu_name(), rig.arch)
        config = replace(config, token_rows=0) if config.token_rows and config.token_rows < min(m, config.chunk_rows) else config
        error = case.error(config)
        if not error < MAX_ERROR:
            tqdm.write(f"{m:6d}  WRONG: relative error {error:.2e} with {describe(config)}; not timed")
            continue
        p10, ms, p90, sustained = (round(us * 1e-3, 5) for us in astuple(case.timing(config)))
        experts = case.experts()
        row = Row(m, ms, experts, experts * case.dims.expert_bytes / 1e9)
        rows.append(row)
        tqdm.write(format_row(row, shape, read_bps, note_of(m)) + f"  sustained {sustained:.4f} ms  [{describe(config)}; {why}]")
        if options.json:
            record = {
                "schema": 1, **key, "M": m, "ms": ms, "ms_p10": p10, "ms_p90": p90, "ms_sustained": sustained,
                "experts": experts,
                "gb": round(row.gb, 4), "tb_s": round(row.tb_s, 4), "share": round(row.tb_s * 1e12 / read_bps, 4),
                "tflops": round(shape.flops(m) / ms * 1e-9, 1), "read_tb_s": round(read_bps * 1e-12, 4),
                "error": float(f"{error:.2e}"), "calls": case.calls, "config": asdict(config), **source,
            }  # fmt: skip
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return rows, read_bps


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    experts, hidden, width, top_k = parse_shape(options.shape)
    if width % options.tp:
        raise SystemExit(f"--tp {options.tp} does not divide the expert width {width}")
    shape = Shape(experts, hidden, width // options.tp, top_k)
    sizes = [int(m) for m in options.m.split(",")]
    measured = has_gpu()
    if measured:
        from runtime.kernels_cu.device import gpu_name

        name = options.hardware or (gpu_name() if gpu_name() in HARDWARE else "h200")
        hw = find_hardware(name)
        rows, read_bps = measure(options, shape, sizes)
    else:
        hw = find_hardware(options.hardware or "h200")
        rows, read_bps = predicted_rows(shape, sizes, hw), hw.read_bps
        print(f"no CUDA device here: PREDICTED rows for {hw.name} ({hw.read_bps * 1e-12:.2f} TB/s), floor / 0.94 + 8 us; nothing was run")
        print(HEADER)
        for row in rows:
            print(format_row(row, shape, read_bps, f"predicted {note_of(row.M)}"))
    print("\n" + analyse(rows, shape, read_bps, options.tp, hw))
    if options.shape == "kimi-k26" and options.tp == 1:
        print("\n" + compare_published(shape, find_hardware("rtx-pro-6000")))
    if options.plot:
        title = f"INT4 MoE layer, {options.shape} TP{options.tp}, {options.routing}, {hw.name}{'' if measured else ' (predicted)'}"
        options.plot.write_text(draw(rows, shape, read_bps, hw, title, sizes))


if __name__ == "__main__":
    main()
