#!/usr/bin/env python3
"""Times tree attention over the latent cache: heads x streams x query rows x context, with a real tree's mask.

    python tools/bench_mla.py                                        # the shapes of CASES, every likely configuration
    python tools/bench_mla.py --cases 8x10x9x65536 --json tools/results/mla_h200.jsonl
    python tools/bench_mla.py --check                                # numerics only
    python tools/bench_mla.py --predict                              # no GPU needed
    python tools/bench_mla.py --variants --json tools/results/mla_variants_h200.jsonl  # of the kernels, tools/mla_variants.py
    python tools/bench_mla.py --variants --build                     # compiles them; no GPU needed

Numerics come first: ragged batches against the NumPy definition, then rows of the very case against float64; a wrong kernel
gets no time. Timed is a CUDA graph of one layer's launch a call, each call with a page table of its own over a pool of
1.8 GB, so that L2 is cold; us is the median of nine replays after a cool-down divided by the calls: a step's other kernels leave
the card's power alone, and peers were timed by 3 to 30 replays. us_sustained: from half a second of replays on. Planning runs once
a step and is printed by itself.
floor_us: latents read once, all keys for every row (`ops.Cost`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.bits import ancestor_bits
from runtime.hw import HARDWARE
from runtime.kernels_cu._build import include_closure, read_source
from runtime.kernels_cu.tree_mla_config import Config, Dims, candidates, predict_us, served, work
from runtime.ops import OPS
from tools.graph_timing import capture, replay_us, timing
from tools.mla_rig import Attention, as_float
from tools.mla_variants import describe

H200 = HARDWARE["h200"]
PAGE, PAGES, WIDTH, VALUE, SCALE = 64, 24576, 576, 512, 0.1447
MAX_ERROR = 5e-3  # relative L2 of a row; bf16 weights and outputs alone give 2e-3
# heads x streams x rows x context -> (best causal peer, best tree-masked peer, must, goal), us on one H200
CASES: dict[str, tuple[float | None, ...]] = {
    "8x1x9x4096": (18.2, 29.8, 13, 8),
    "8x10x1x4096": (23.0, None, 17, 14),
    "8x10x9x4096": (30.6, 49.8, 30, 20),
    "8x10x9x65536": (263, 310, 240, 195),
    "8x10x33x65536": (707, 1142, 690, 560),
    "32x10x9x4096": (59.7, 115, 58, 42),
    "64x10x9x4096": (90.8, 156, 88, 75),
    "64x10x33x65536": (4463, 4956, 4400, 4050),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One shape."""

    heads: int
    streams: int
    q: int
    ctx: int

    @property
    def dims(self) -> Dims:
        return Dims(self.q * self.streams, self.streams, self.heads, self.ctx + self.q, PAGE, -(-self.q // 64))

    @property
    def floor_us(self) -> float:
        keys = float(self.streams * (self.ctx + self.q))
        symbols = {"M": float(self.dims.M), "A": float(self.heads), "L": 512.0, "R": 64.0, "B": float(self.streams), "keys": keys}
        return float(OPS["tree_mla"].cost(symbols).floor_us(H200))

    @property
    def flops(self) -> float:
        return 2.0 * self.dims.M * self.heads * (self.ctx + self.q) * (WIDTH + VALUE)

    @property
    def calls(self) -> int:
        """Calls in a graph: enough to read 288 MB, 3 to 61."""
        return int(min(61, max(3, (288 << 20) // (self.streams * self.ctx * WIDTH * 2) + 1)))


def parse_case(text: str) -> Case:
    numbers = [int(x) for x in text.split("x")]
    if len(numbers) != 4 or min(numbers) < 1:
        raise SystemExit(f"case {text!r}: heads x streams x rows x context, such as 8x10x9x4096")
    return Case(*numbers)


def likely(case: Case, arch: str) -> list[Config]:
    """Candidates as they are served, the one of least predicted time first, then the other kernel's best, then the rest."""
    found = sorted(candidates(case.dims, arch), key=lambda c: predict_us(case.dims, c, H200))
    found = list(dict.fromkeys(served(c, case.dims) for c in found))
    other = next((c for c in found if c.rows != found[0].rows), found[0])
    return sorted(found, key=lambda c: 0 if c is found[0] else 1 if c is other else 2)


def random_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    return np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)], np.int16)


class Bench:
    """Device memory of one case, its launches under any configuration, numerics and time."""

    def __init__(self, pool: Any, rig: Any, case: Case) -> None:
        import cupy as cp

        self.cp, self.rig, self.case, self.pool = cp, rig, case, pool
        rng = np.random.default_rng(7)
        d, streams = case.dims, case.streams
        self.words = np.concatenate([ancestor_bits(random_tree(rng, case.q), d.words) for _ in range(streams)])
        order = rng.permutation(np.resize(np.arange(1, PAGES), case.calls * streams * d.pages_each))
        self.tables = order.reshape(case.calls, streams, d.pages_each).astype(np.int32)
        self.q = rig.normal(d.M * case.heads, WIDTH, 3)
        self.out = cp.zeros((d.M, case.heads, VALUE), cp.uint16)
        host = {
            "ctx": np.full(streams, case.ctx, np.int32),
            "row0": np.arange(streams, dtype=np.int32) * case.q,
            "seq": np.repeat(np.arange(streams, dtype=np.int32), case.q),
            "ancestors": self.words,
            "tables": self.tables,
        }
        self.arrays = {name: cp.asarray(a) for name, a in host.items()}
        self.room: dict[str, Any] = {}

    def launches(self, config: Config) -> tuple[Any, list[Any]]:
        """The plan, and for each page table a launch or two."""
        from runtime.kernels_cu.tree_mla import build_kernels, layer_launch, merge_launch, merges_later, plan_launch, workspace_bytes

        cp, d = self.cp, self.case.dims
        kernels = build_kernels(d, config, self.rig.arch, self.rig.sms)
        self.room = {name: cp.zeros(size, cp.uint8) for name, size in workspace_bytes(d, config, self.rig.sms).items()}
        at = {name: a.data.ptr for name, a in (self.room | self.arrays).items()}
        at |= {"q": self.q.data.ptr, "cache": self.pool.data.ptr, "out": self.out.data.ptr, "pages": at["tables"]}
        layers = []
        for k in range(self.case.calls):
            here = at | {"pages": at["tables"] + k * self.tables[0].nbytes}
            layers.append(layer_launch(kernels, here, SCALE, slots=PAGES * PAGE, behind_plan=not k))
            if merges_later(config):
                layers.append(merge_launch(kernels, here, SCALE))
        return plan_launch(kernels, at), layers

    @cached_property
    def wanted(self) -> list[tuple[int, int, np.ndarray]]:
        """(row, head, output in float64) of a few rows of the first and the last stream of the first page table."""
        cp, case, found = self.cp, self.case, []
        for b in {0, case.streams - 1}:
            place = np.arange(case.ctx + case.q)
            rows = cp.asarray(self.tables[0, b, place // PAGE].astype(np.int64) * PAGE + place % PAGE)
            keys = as_float(cp.asnumpy(self.pool.reshape(-1, WIDTH)[rows])).astype(np.float64)
            for node in {0, case.q // 2, case.q - 1}:
                i = b * case.q + node
                seen = np.ones(len(keys), bool)
                bits = np.unpackbits(self.words[i].view(np.uint8), bitorder="little")[: case.q]
                seen[case.ctx :] = bits.astype(bool)
                for head in {0, case.heads - 1}:
                    score = keys @ as_float(cp.asnumpy(self.q[i * case.heads + head])).astype(np.float64) * SCALE
                    weight = np.where(seen, np.exp(score - score[seen].max()), 0.0)
                    found.append((i, head, weight @ keys[:, :VALUE] / weight.sum()))
        return found

    def error(self, launches: tuple[Any, list[Any]]) -> float:
        """Largest relative L2 error of the rows of `wanted`; inf for anything not finite. `out` is then the whole output."""
        cp, stream = self.cp, self.rig.stream
        self.out[...] = 0xFFFF
        self.room["part"][...] = 0xFF
        cp.cuda.Device().synchronize()
        for launch in (launches[0], *launches[1][: len(launches[1]) // self.case.calls]):
            launch.run(stream.ptr)
        stream.synchronize()
        worst = 0.0
        for i, head, want in self.wanted:
            got = as_float(cp.asnumpy(self.out[i, head])).astype(np.float64)
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            worst = max(worst, error if np.isfinite(error) else float("inf"))
        return worst

    def apart(self, other: Any) -> float:
        """Largest relative L2 distance of a row of `out` from another output, all rows; NaN or inf where one is not finite."""
        here, there = ((bits.astype(self.cp.uint32) << 16).view(self.cp.float32) for bits in (self.out, other))
        return float((self.cp.linalg.norm(here - there, axis=-1) / self.cp.linalg.norm(there, axis=-1)).max())

    def graph(self, launches: list[Any]) -> Any:
        return capture(self.rig.stream, [launch.run for launch in launches])

    def time_us(self, launches: list[Any], seconds: float = 0.2, calls: int = 0) -> float:
        """Median microseconds of a call inside a graph of all launches; calls: 0 if each is one."""
        return float(np.median(replay_us(self.rig.stream, self.graph(launches), seconds))) / (calls or len(launches))


def check_numerics(arch: str) -> None:
    """Ragged batches against the NumPy definition, every width of both products; SystemExit on the first that is wrong."""
    from tests.compare import compare
    from tests.runtime.kernels_cu.mla_cases import SCALE as scale
    from tests.runtime.kernels_cu.mla_cases import make_batch

    batch = make_batch(8, [9, 1, 33, 5], [1000, 0, 63, 64], seed=1, bucket=50, sequences=6)
    want = batch.reference()
    for config in portable_and_own(batch.dims, arch):
        found = compare(Attention(batch, config, scale).run(), want, OPS["tree_mla"].tolerance)
        print(f"  {describe(config):<28} {'ok' if found.ok else 'WRONG'}: {str(found).splitlines()[0]}", flush=True)
        if not found.ok:
            raise SystemExit(f"{config}\n{found}")


def portable_and_own(dims: Dims, arch: str) -> Iterator[Config]:
    yield from (c for c in candidates(dims, "sm_120a") if not c.ahead and c.float_parts)
    yield from dict.fromkeys(served(c, dims) for c in candidates(dims, arch) if c.wgmma)


def source_digest(source: str) -> str:
    """Of a kernel and all that it includes."""
    h = hashlib.sha256(read_source(source).encode())
    for name, text in sorted(include_closure(source).items()):
        h.update(f"{name}\0{text}".encode())
    return h.hexdigest()[:12]


def table_line(case: Case, us: float, note: str) -> str:
    return (
        f"{case.heads:5d}{case.streams:8d}{case.q:5d}{case.ctx:8d}{us:10.1f}{case.floor_us:10.1f}{case.floor_us / us:7.3f}"
        f"{case.flops / us * 1e-6:8.1f}  {note}"
    )


def targets(name: str) -> str:
    causal, tree, must, goal = CASES.get(name, (None,) * 4)
    return f"must {must} goal {goal}; peers {causal} causal, {tree} tree" if must else ""


def measure(options: argparse.Namespace) -> None:
    import cupy as cp

    from tools.bench_moe import provenance
    from tools.moe_rig import Rig

    rig = Rig()
    print(f"{rig.arch}, {rig.sms} SMs; numerics against the NumPy definition", flush=True)
    check_numerics(rig.arch)
    if options.check:
        return
    pool = rig.normal(PAGES * PAGE, WIDTH, 5)
    print("heads streams    q     ctx        us  floor_us  share  tflops", flush=True)
    for name in options.cases.split(","):
        case = parse_case(name)
        bench = Bench(pool, rig, case)
        best: tuple[float, Config, float, float] | None = None
        for config in likely(case, rig.arch)[: options.most]:
            launches = bench.launches(config)
            error = bench.error(launches)
            if not error < MAX_ERROR:
                print(f"  {describe(config)}: WRONG, relative error {error:.2e}; not timed", flush=True)
                continue
            us, plan_us = bench.time_us(launches[1], calls=case.calls), bench.time_us([launches[0]] * 16, 0.02)
            w = work(case.dims, config, rig.sms)
            print(f"  {describe(config):<28} {us:9.1f} us, plan {plan_us:5.1f} us, {w.splits} splits, error {error:.1e}", flush=True)
            if best is None or us < best[0]:
                best = (us, config, error, plan_us)
        if best is None:
            raise SystemExit(f"{name}: no configuration was right")
        _, config, error, plan_us = best
        launches = bench.launches(config)
        launches[0].run(rig.stream.ptr)  # the plan in place is that of the configuration tried last
        took = timing(rig.stream, bench.graph(launches[1]), case.calls)
        us = took.p50
        print(table_line(case, us, f"sustained {took.sustained:.1f} [{describe(config)}] {targets(name)}"), flush=True)
        if options.json:
            record = {
                "schema": 2, **asdict(case), "us": round(us, 2), "us_p10": round(took.p10, 2), "us_p90": round(took.p90, 2),
                "us_sustained": round(took.sustained, 2), "floor_us": round(case.floor_us, 2), "share": round(case.floor_us / us, 4),
                "tflops": round(case.flops / us * 1e-6, 1), "plan_us": round(plan_us, 2), "error": float(f"{error:.2e}"),
                "calls": case.calls, "config": asdict(config), **provenance(options.commit), "src": source_digest(config.source),
            }  # fmt: skip
            options.json.parent.mkdir(parents=True, exist_ok=True)
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        del bench
        cp.get_default_memory_pool().free_all_blocks()


def predict(options: argparse.Namespace) -> None:
    print("PREDICTED for one H200; nothing was run\nheads streams    q     ctx        us  floor_us  share  tflops")
    for name in options.cases.split(","):
        case = parse_case(name)
        config = likely(case, "sm_90a")[0]
        w = work(case.dims, config)
        note = f"[{describe(config)}; {w.splits} splits, {w.waves} waves] {targets(name)}"
        print(table_line(case, predict_us(case.dims, config, H200), note))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="heads x streams x rows x context, comma-separated")
    parser.add_argument("--json", type=Path, help="append a record a case")
    parser.add_argument("--check", action="store_true", help="numerics only")
    parser.add_argument("--predict", action="store_true", help="predicted times, without a GPU")
    parser.add_argument("--variants", action="store_true", help="what is served beside builds that await a measurement")
    parser.add_argument("--build", action="store_true", help="with --variants: compile them, run nothing")
    parser.add_argument("--seconds", type=float, default=140.0, help="with --variants: none is begun after so many")
    parser.add_argument("--first", type=int, default=0, help="with --variants: the job to begin with, as an earlier run names it")
    parser.add_argument("--without", default="", help="with --variants: jobs of the first round to leave out of all, comma-separated")
    parser.add_argument("--most", type=int, default=10, help="configurations tried a case, likeliest first")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    options = parser.parse_args(arguments)
    if options.variants:
        from tools.mla_side_by_side import measure_variants

        measure_variants(options)
    else:
        (predict if options.predict else measure)(options)


if __name__ == "__main__":
    main()
