#!/usr/bin/env python3
"""Times the bf16 products of Kimi K2.6: the skinny kernel to 16 rows, the streaming one to 64, cuBLASLt at any number.

    python tools/bench_linear.py                                     # every shape, the configuration that would be used
    python tools/bench_linear.py --tune --json tools/results/linear_h200.jsonl
    python tools/bench_linear.py --shapes qkv_a,o --m 1,16,64        # some of them
    python tools/bench_linear.py --tune --kernels stream             # tunes one kernel, times it and cuBLASLt

A product is checked against float64 first; a wrong one gets no time. Timed is a CUDA graph of calls over different weights, 192 MB
of them or more, so that L2 (60 MB) is cold, and eight or more where they fit 2.7 GB, as in a step; us is the median of the replays
divided by the calls. Share = floor / us: weights, rows and results once at the best read rate of the same run, or 2 M N K at the
card's product rate, whichever is longer.
--tune times every candidate of the kernels and writes the best of each for all M into tuned/<gpu>.json.
Without a GPU it says so and prints the predicted times of the kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.cost import Cost
from runtime.hw import find_hardware
from runtime.kernels_cu import linear_skinny, linear_stream
from runtime.kernels_cu._build import build
from runtime.kernels_cu.linear_choice import choose_config, choose_stream, source_digest, tuned_key
from runtime.kernels_cu.linear_lt import describe
from runtime.kernels_cu.linear_skinny import Dims
from tools.bench_moe import has_gpu, provenance
from tools.tune import write_tuned

ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024)
FAMILIES: dict[str, Any] = {"skinny": linear_skinny, "stream": linear_stream}
CHOOSE: dict[str, Any] = {"skinny": choose_config, "stream": choose_stream}
TPS = (1, 2, 4, 8)
TUNE_ROWS = {"skinny": (16, 8, 1), "stream": (16, 8, 1, 32, 64)}  # all candidates at the first, finalists at the others
ENTRANTS = 80  # candidates timed, likeliest first: some 20 ms each
FINALISTS = 6  # of the candidates at 16 rows, timed at fewer too
HANDED = 3  # of the candidates at 16 rows, and of those that leave room for the next launch, whose ways to hand over are timed
COLD_BYTES, POOL_BYTES, LEAST_CALLS = 192 << 20, 5 << 29, 8
MAX_ERROR = {False: 4e-3, True: 1e-4}  # relative L2 of sampled results; rounding to bf16 alone gives 1.7e-3
Run = Callable[[int], None]
Build = tuple[str, tuple[tuple[str, int], ...]]  # source, constants


@dataclass(frozen=True, slots=True)
class Shape:
    """out [M, heads, N] = x [M, heads, K] w [heads, N, K]^T on one of tp ranks."""

    name: str
    tp: int
    N: int
    K: int
    heads: int = 1
    float_out: bool = False

    def dims(self, m: int) -> Dims:
        if self.name == "w_uk":
            return Dims.absorb(m, self.heads, self.K, 64, self.N)
        if self.name == "w_uv":
            return Dims.value(m, self.heads, self.K, self.N)
        return Dims.plain(m, self.N, self.K)

    @property
    def weight_bytes(self) -> int:
        return 2 * self.heads * self.N * self.K

    def cost(self, m: int) -> Cost:
        out = (4.0 if self.float_out else 2.0) * m * self.heads * self.N
        return Cost(2.0 * m * self.heads * self.N * self.K, self.weight_bytes + 2.0 * m * self.heads * self.K, out)


def kimi_shapes() -> list[Shape]:
    """The products of a layer and of the head at every TP, and the square one that libraries are compared on."""
    found = [Shape("square", 1, 7168, 7168), Shape("qkv_a", 1, 2112, 7168), Shape("router", 1, 384, 7168, float_out=True)]
    for tp in TPS:
        heads = 64 // tp
        found += [
            Shape("q_b", tp, 192 * heads, 1536), Shape("w_uk", tp, 512, 128, heads), Shape("w_uv", tp, 128, 512, heads),
            Shape("o", tp, 7168, 128 * heads), Shape("shared_up", tp, 4096 // tp, 7168), Shape("shared_down", tp, 7168, 2048 // tp),
            Shape("dense_up", tp, 36864 // tp, 7168), Shape("dense_down", tp, 7168, 18432 // tp),
            Shape("head", tp, 163840 // tp, 7168, float_out=True),
        ]  # fmt: skip
    return found


class Case:
    """A shape at M rows: its copies of the weights in a pool, x, out, and runs of either kernel over all copies."""

    def __init__(self, device: Any, pool: Any, shape: Shape, m: int, least_calls: int = LEAST_CALLS) -> None:
        import cupy as cp

        self.cp, self.device, self.pool, self.shape, self.dims = cp, device, pool, shape, shape.dims(m)
        step = -(-shape.weight_bytes // 256) * 256
        self.calls = max(1, min(48, max(least_calls, COLD_BYTES // step + 1), pool.nbytes // step))
        self.weights = [int(pool.data.ptr) + i * step for i in range(self.calls)]
        if self.calls == 1 and shape.weight_bytes > pool.nbytes:
            raise ValueError(f"{shape}: {shape.weight_bytes} bytes of weights, the pool holds {pool.nbytes}")
        rows = np.random.default_rng(m).standard_normal((m, self.dims.x_row), np.float32)
        self.x_host = rows.view(np.uint32) & np.uint32(0xFFFF0000)  # truncated to bf16: exact in both
        self.x = cp.asarray((self.x_host >> 16).astype(np.uint16))
        self.out = cp.zeros((m, self.dims.out_row), cp.float32 if shape.float_out else cp.uint16)
        self.room: dict[str, Any] = {}

    def kernel(self, name: str, config: Any) -> list[Run]:
        """Launches of a kernel of FAMILIES."""
        family = FAMILIES[name]
        config = family.widened(config, self.dims.M)
        self.room = {field: self.cp.zeros(size, self.cp.uint8) for field, size in family.workspace_bytes(self.dims, config).items()}
        source, entries = (config.source, config.entries) if name == "stream" else (family.SOURCE, family.ENTRIES)
        functions = self.device.functions(source, config.defines(), entries)
        at = {field: int(a.data.ptr) for field, a in self.room.items()} | {
            "x": int(self.x.data.ptr),
            "out": int(self.out.data.ptr),
            "seq": 0,
        }
        calls = [family.call(config, self.dims, at | {"w": w}, self.shape.float_out) for w in self.weights]
        return [self.device.prepare(call, functions).run for call in calls]

    def library(self, invariant: bool = False) -> tuple[list[Run], str]:
        d = self.dims
        strides = {"x_row": d.x_row, "out_row": d.out_row, "heads": d.heads, "x_head": d.x_head, "out_head": d.out_head}
        described = describe(d.M, d.N, d.K, **strides, float_out=self.shape.float_out)
        x, out = int(self.x.data.ptr), int(self.out.data.ptr)
        made = [self.device.multiply(described, w, x, out, invariant=invariant) for w in self.weights]
        return [one.run for one in made], str(made[0])

    def error(self, runs: Sequence[Run]) -> float:
        """Relative L2 of sampled weight rows of the first copy, all rows of x, against float64; infinite for what is not finite."""
        cp, d, s = self.cp, self.dims, self.shape
        self.out[...] = np.nan if s.float_out else 0xFFFF
        cp.cuda.Device().synchronize()
        runs[0](self.device.stream)
        self.device.synchronize()
        picked = np.unique(np.linspace(0, d.N - 1, 24).astype(np.int64))
        x = self.x_host.view(np.float32).astype(np.float64)
        got, want = [], []
        for head in {0, d.heads - 1}:
            flat = self.pool.reshape(-1)[: d.heads * d.N * d.K].reshape(d.heads, d.N, d.K)
            w = as_float(cp.asnumpy(flat[head][cp.asarray(picked)])).astype(np.float64)
            want.append(x[:, head * d.x_head : head * d.x_head + d.K] @ w.T)
            out = cp.asnumpy(self.out[:, cp.asarray(head * d.out_head + picked)])
            got.append(out if s.float_out else as_float(out))
        there, here = np.concatenate(got, 1).astype(np.float64), np.concatenate(want, 1)
        return float(np.linalg.norm(there - here) / np.linalg.norm(here)) if np.isfinite(there).all() else float("inf")

    def time_us(self, runs: Sequence[Run], seconds: float) -> float:
        from tools.graph_timing import time_us

        return time_us(self.cp.cuda.ExternalStream(self.device.stream), runs, seconds)


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def compiles(job: tuple[str, dict[str, int], str]) -> str:
    """Fills the cubin cache; the reason if a candidate can not be used."""
    try:
        build(*job)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:160]}"
    return ""


def builds_of(kernel: str, config: Any, rows: Sequence[int] = ()) -> list[Build]:
    """Source and constants of a configuration at each M; those that tuning times where none is given."""
    wide = [FAMILIES[kernel].widened(config, m) for m in rows or TUNE_ROWS[kernel]]
    return [(one.source if kernel == "stream" else FAMILIES[kernel].SOURCE, tuple(one.defines().items())) for one in wide]


def usable(kernel: str, shapes: Sequence[Shape], arch: str) -> set[Build]:
    """Builds of all candidates that compile, on all cores."""
    family = FAMILIES[kernel]
    builds = sorted({b for s in shapes for c in family.candidates(s.dims(TUNE_ROWS[kernel][0]), arch) for b in builds_of(kernel, c)})
    with ProcessPoolExecutor() as pool:
        reasons = list(pool.map(compiles, [(source, dict(defines), arch) for source, defines in builds]))
    for one, reason in zip(builds, reasons, strict=True):
        if reason:
            print(f"left out {one[0]} {dict(one[1])}: {reason}", flush=True)
    return {one for one, reason in zip(builds, reasons, strict=True) if not reason}


def tune(device: Any, pool: Any, shape: Shape, kernel: str, built: set[Any], seconds: float, least_calls: int) -> dict[str, Any]:
    """The tuned entry of the candidate with the least time summed over TUNE_ROWS, each relative to the best there."""
    times: dict[Any, dict[int, float]] = {}
    rows, family, hw = TUNE_ROWS[kernel], FAMILIES[kernel], find_hardware("h200")
    dims = shape.dims(rows[0])
    fitting = [c for c in family.candidates(dims, device.arch) if built.issuperset(builds_of(kernel, c))]
    entered = sorted(fitting, key=lambda c: family.predict_us(dims, c, hw, device.sms, device.arch))[:ENTRANTS]
    library = {}

    def enter(case: Case, configs: Sequence[Any]) -> list[Any]:
        """Those that are right, fastest first."""
        for config in configs:
            runs = case.kernel(kernel, config)
            error = case.error(runs)
            if error < MAX_ERROR[shape.float_out]:
                times.setdefault(config, {})[case.dims.M] = case.time_us(runs, seconds)
            else:
                print(f"  {shape.name} M {case.dims.M}: {config} WRONG, relative error {error:.2e}", flush=True)
        return sorted((c for c in configs if case.dims.M in times.get(c, {})), key=lambda c: times[c][case.dims.M])

    for m in rows:
        case = Case(device, pool, shape, m, least_calls)
        entered = enter(case, entered)
        if m == rows[0] and kernel == "stream":
            overlapping = [c for c in entered if c.overlaps(dims, device.sms)]
            others = {v: None for c in (*entered[:HANDED], *overlapping[:HANDED]) for v in linear_stream.hand_overs(c) if v not in times}
            entered = sorted([*entered, *enter(case, list(others))], key=lambda c: times[c][m])
            report_fastest(shape, m, {c: times[c][m] for c in entered}, set(overlapping))
        entered = entered[:FINALISTS]
        if not entered:
            raise RuntimeError(f"{shape}: no candidate of {kernel} was right at M = {m}")
        library[m] = case.time_us(case.library()[0], seconds)
    best = {m: min(times[c][m] for c in entered) for m in rows}
    chosen = min(entered, key=lambda c: sum(times[c][m] / best[m] for m in rows))
    us, library_us = ({str(m): round(found[m], 2) for m in sorted(rows)} for found in (times[chosen], library))
    return {"config": asdict(chosen), "us": us, "library_us": library_us, "src": source_digest(kernel, asdict(chosen))}


def report_fastest(shape: Shape, m: int, us: dict[Any, float], overlapping: set[Any]) -> None:
    """The fastest of each ring and way to hand over: what room for the next launch, an early start and boxes ahead are worth."""
    bare = {replace(c, early=0, ahead=0) for c in overlapping}
    kinds: dict[tuple[bool, int, bool, bool], Any] = {}
    for c in sorted(us, key=lambda c: us[c]):
        kinds.setdefault((replace(c, early=0, ahead=0) in bare, min(c.early, 99), c.ahead > 0, c.carried), c)
    for (fits, *_), c in kinds.items():
        print(f"  {shape.name} M {m}: {us[c]:.2f} us {describe_config(c)}{' fits twice' if fits else ''}", flush=True)


def configured(options: argparse.Namespace, device: Any, pool: Any, shape: Shape, built: dict[str, set[Any]]) -> dict[str, tuple[Any, str]]:
    """Of each kernel that takes the shape here the configuration that is timed at all M, and why it."""
    found = {}
    for kernel in options.kernels:
        if not FAMILIES[kernel].candidates(shape.dims(1), device.arch):
            continue
        config, why = CHOOSE[kernel](shape.dims(1), device.gpu, device.arch)
        if options.tune:
            entry = tune(device, pool, shape, kernel, built[kernel], options.seconds, options.calls)
            config, why = type(config)(**entry["config"]), "tuned now"
            path = options.tuned or ROOT / "runtime/kernels_cu/tuned" / f"{device.gpu}.json"
            write_tuned(path, {tuned_key(shape.dims(1), kernel): entry})
        found[kernel] = config, why
    return found


def measure(options: argparse.Namespace, shapes: Sequence[Shape], rows: Sequence[int]) -> None:
    import cupy as cp

    from runtime.kernels_cu.device import CupyDevice
    from tools.moe_rig import Rig

    rig, device = Rig(), CupyDevice()
    read_bps, hw = rig.read_bps(), find_hardware("h200")
    pool = rig.normal(POOL_BYTES // 2048, 1024, 5)
    source = provenance(options.commit)
    print(f"{source['gpu']}, best read rate {read_bps * 1e-12:.3f} TB/s, products at {hw.tensor_flops * 1e-12:.0f} TFLOP/s ({hw.source})")
    built = {kernel: usable(kernel, shapes, device.arch) for kernel in options.kernels if options.tune}
    print(HEADER, flush=True)
    for shape in shapes:
        kernels = configured(options, device, pool, shape, built)
        for m in rows:
            case = Case(device, pool, shape, m, options.calls)
            runs: dict[str, tuple[list[Run], str]] = {"cublasLt": case.library()}
            if options.invariant:
                runs["cublasLt invariant"] = case.library(invariant=True)
            for kernel, (config, why) in kernels.items():
                if m <= FAMILIES[kernel].MOST_ROWS:
                    runs[kernel] = (case.kernel(kernel, config), f"{describe_config(FAMILIES[kernel].widened(config, m))} {why}")
            for kernel, (launches, note) in runs.items():
                error = case.error(launches)
                if not error < MAX_ERROR[shape.float_out]:
                    print(f"{shape.name} M {m} {kernel}: WRONG, relative error {error:.2e}; not timed", flush=True)
                    continue
                us, cost = case.time_us(launches, options.seconds), shape.cost(m)
                floor_us = max(cost.bytes / read_bps, cost.flops / hw.tensor_flops) * 1e6
                print(table_line(shape, m, kernel, us, floor_us, read_bps, note), flush=True)
                record(options.json, {
                    "schema": 1, **asdict(shape), "M": m, "kernel": kernel, "us": round(us, 2), "floor_us": round(floor_us, 2),
                    "share": round(floor_us / us, 4), "tb_s": round(cost.bytes / us * 1e-6, 3), "tflops": round(cost.flops / us * 1e-6, 1),
                    "read_tb_s": round(read_bps * 1e-12, 3), "error": float(f"{error:.2e}"), "calls": case.calls, "config": note, **source,
                    "src": source_digest(kernel, asdict(FAMILIES[kernel].widened(kernels[kernel][0], m))) if kernel in FAMILIES else "",
                })  # fmt: skip
        cp.get_default_memory_pool().free_all_blocks()


HEADER = f"{'shape':<12}{'tp':>3}{'N':>8}{'K':>7}{'x':>4}{'M':>6}  {'kernel':<19}{'us':>9}{'floor':>9}{'share':>7}{'TB/s':>7}{'TFLOP/s':>9}"


def table_line(shape: Shape, m: int, kernel: str, us: float, floor_us: float, read_bps: float, note: str) -> str:
    cost = shape.cost(m)
    return (
        f"{shape.name:<12}{shape.tp:3d}{shape.N:8d}{shape.K:7d}{shape.heads:4d}{m:6d}  {kernel:<19}{us:9.2f}{floor_us:9.2f}"
        f"{floor_us / us:7.3f}{cost.bytes / us * 1e-6:7.2f}{cost.flops / us * 1e-6:9.1f}  {note}"
    )


def describe_config(c: Any) -> str:
    if isinstance(c, linear_stream.Config):
        handing = f"{f' e{c.early}' if c.early < linear_stream.AT_ONCE else ' at once'}" if c.early else ""
        ways = f"{' carried' if c.carried else ''}{' kept' if c.kept else ''}"
        return f"g{c.groups} t{c.tall} s{c.slots} b{c.blocks}{handing}{f' a{c.ahead}' if c.ahead else ''}{ways}"
    return f"n{c.wn} k{c.wk} d{c.depth}{f' s{c.splits}' if c.splits > 1 else ''}"


def record(path: Path | None, row: dict[str, Any]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def predict(kernels: Sequence[str], shapes: Sequence[Shape], rows: Sequence[int]) -> None:
    hw = find_hardware("h200")
    print(f"no CUDA device here: PREDICTED times of the kernels for one H200 ({hw.read_bps * 1e-12:.2f} TB/s); nothing was run\n{HEADER}")
    for shape, m, kernel in product(shapes, rows, kernels):
        if m <= FAMILIES[kernel].MOST_ROWS:
            dims = shape.dims(m)
            config, why = CHOOSE[kernel](dims, "h200", hw=hw)
            us, floor_us = FAMILIES[kernel].predict_us(dims, config, hw), shape.cost(m).floor_us(hw)
            print(table_line(shape, m, f"{kernel} predicted", us, floor_us, hw.read_bps, f"{describe_config(config)} {why}"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(s.name for s in kimi_shapes()))
    parser.add_argument("--shapes", default=",".join(names), help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--tp", default="1,8", help="tensor-parallel sizes whose shards are timed, of 1, 2, 4 and 8 (default 1,8)")
    parser.add_argument("--m", default=",".join(map(str, ROWS)), help="row counts, comma-separated")
    parser.add_argument("--kernels", default="skinny,stream", help="of skinny, stream (default: both), beside cuBLASLt")
    parser.add_argument("--tune", action="store_true", help="time every candidate of the kernels first and write the best into --tuned")
    parser.add_argument("--tuned", type=Path, help="default: the package's tuned/<gpu>.json")
    parser.add_argument("--invariant", action="store_true", help="time the library's one algorithm for all M, too")
    parser.add_argument(
        "--calls",
        type=int,
        default=LEAST_CALLS,
        help="launches of a graph, at least, where the pool holds their weights: its start costs each a part (default 8)",
    )
    parser.add_argument("--seconds", type=float, default=0.01, help="timing budget of a product, at least five replays (default 0.01)")
    parser.add_argument("--json", type=Path, help="append a record a line of the table")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    options = parser.parse_args(arguments)
    wanted, tps = set(options.shapes.split(",")), {int(tp) for tp in options.tp.split(",")}
    if unknown := sorted(wanted - set(names)):
        parser.error(f"--shapes {', '.join(unknown)}: known are {', '.join(names)}")
    if unknown := sorted(tps - set(TPS)):
        parser.error(f"--tp {', '.join(map(str, unknown))}: known are {', '.join(map(str, TPS))}")
    options.kernels = options.kernels.split(",") if options.kernels else []
    if unknown := sorted(set(options.kernels) - set(FAMILIES)):
        parser.error(f"--kernels {', '.join(unknown)}: known are {', '.join(FAMILIES)}")
    shapes, rows = [s for s in kimi_shapes() if s.name in wanted and s.tp in tps], [int(m) for m in options.m.split(",")]
    if has_gpu():
        measure(options, shapes, rows)
    else:
        predict(options.kernels, shapes, rows)


if __name__ == "__main__":
    main()
