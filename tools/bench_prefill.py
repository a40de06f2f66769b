#!/usr/bin/env python3
"""Times attention of a prompt's chunk in both forms: absorbed (tree_mla) and un-absorbed (chunk_expand and chunk_attention).

    python tools/bench_prefill.py --json tools/results/prefill_h200.jsonl    # heads x rows x context of CASES
    python tools/bench_prefill.py --cases 64x1024x32768
    python tools/bench_prefill.py --predict                                  # no GPU needed

A few rows of the very case are compared with float64 first; a wrong kernel gets no time. Timed are CUDA graphs of CALLS layers; us is
the median of the replays divided by the calls. floor_us: each key expanded once, all keys to its own for every row (`ops.Cost`).
Products before and after (mla_query, mla_value) are in neither time: today both forms pay them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.chunks import TILE
from runtime.hw import HARDWARE
from runtime.kernels_cu import chunk_attention as family
from runtime.kernels_cu.tree_mla_config import Dims, candidates
from runtime.kernels_cu.tree_mla_config import predict_us as predict_absorbed_us
from runtime.ops import OPS

H200 = HARDWARE["h200"]
PAGE, SCALE, LEAST, CALLS, MAX_ERROR = 64, 0.1447, 171, 4, 6e-3  # error: relative L2 of a row, bf16 keys, weights and outputs
CASES = ",".join(f"{heads}x{rows}x{ctx}" for heads in (64, 8) for rows in (1024, 4096) for ctx in (0, 8192, 32768))


@dataclass(frozen=True, slots=True)
class Case:
    """One chunk of `rows` rows behind ctx committed keys."""

    heads: int
    rows: int
    ctx: int

    @property
    def keys(self) -> int:
        return self.ctx + self.rows

    @property
    def symbols(self) -> dict[str, float]:
        row_keys = self.rows * (self.ctx + (self.rows + 1) / 2)
        sizes = {"L": 512, "R": 64, "N": 128, "U": 128}
        return {"M": self.rows, "A": self.heads, "B": 1, "keys": self.keys, "row_keys": row_keys, **sizes}

    @property
    def absorbed(self) -> Dims:
        return Dims(self.rows, 1, self.heads, self.keys, PAGE, -(-self.rows // 64))


def parse_case(text: str) -> Case:
    numbers = [int(x) for x in text.split("x")]
    if len(numbers) != 3 or numbers[0] < 1 or numbers[1] < LEAST or numbers[2] < 0:
        raise SystemExit(f"case {text!r}: heads x rows x context with {LEAST} rows or more, such as 64x1024x8192")
    return Case(*numbers)


class Bench:
    """Device memory of one case and its launches in both forms."""

    def __init__(self, rig: Any, case: Case) -> None:
        import cupy as cp

        self.cp, self.rig, self.case = cp, rig, case
        c, pages = case, -(-case.keys // PAGE)
        table = 1 + np.random.default_rng(7).permutation(pages).astype(np.int32)
        words = np.packbits(np.tri(c.rows, c.absorbed.words * 64, dtype=bool), axis=1, bitorder="little").view(np.uint64)
        host = {
            "pages": table[None], "ctx": np.array([c.ctx], np.int32), "row0": np.zeros(1, np.int32), "seq": np.zeros(c.rows, np.int32),
            "pos": c.ctx + np.arange(c.rows, dtype=np.int32), "ancestors": words, "rest": np.zeros(c.rows, np.int32),
        }  # fmt: skip
        self.at = {name: cp.asarray(a) for name, a in host.items()}
        shapes = {
            "q": (c.rows, c.heads * 192), "absorbed": (c.rows * c.heads, 576), "cache": ((pages + 1) * PAGE, 576),
            "w_uk": (c.heads * 512, 128), "w_uv": (c.heads * 128, 512),
        }  # fmt: skip
        self.at |= {name: rig.normal(*shape, seed) for seed, (name, shape) in enumerate(shapes.items(), 3)}
        for name in ("w_uk", "w_uv"):
            w = self.at[name]
            self.at[name] = cp.where(w & 0x7F80 > 5 << 7, w - (5 << 7), 0).astype(cp.uint16)  # times 2^-5, in the exponent's bits
        self.at["value"] = cp.full((c.rows, c.heads * 128), 0xFFFF, cp.uint16)
        self.dims = family.Dims(c.rows, c.heads, (pages + 1) * PAGE, PAGE, pages, -(-c.keys // TILE) * TILE)

    def error(self) -> float:
        """Largest relative L2 error of a few rows and heads against float64; inf for anything not finite."""
        from tools.mla_rig import as_float

        c, host = self.case, lambda name, rows: as_float(self.cp.asnumpy(self.at[name][rows])).astype(np.float64)
        place, table = np.arange(c.keys), self.cp.asnumpy(self.at["pages"])[0].astype(np.int64)
        keys, worst = host("cache", self.cp.asarray(table[place // PAGE] * PAGE + place % PAGE)), 0.0
        for head in {0, c.heads - 1}:
            k = keys[:, :512] @ host("w_uk", slice(head * 512, head * 512 + 512))
            v = keys[:, :512] @ host("w_uv", slice(head * 128, head * 128 + 128)).T
            for row in {0, 63, 64, c.rows // 2, c.rows - 1}:
                nope = host("q", row)[head * 192 : head * 192 + 128]
                seen = c.ctx + row + 1
                score = (k[:seen] @ nope + keys[:seen, 512:] @ host("absorbed", row * c.heads + head)[512:]) * SCALE
                weight = np.exp(score - score.max())
                want = weight @ v[:seen] / weight.sum()
                error = float(np.linalg.norm(host("value", row)[head * 128 : head * 128 + 128] - want) / np.linalg.norm(want))
                worst = max(worst, error if np.isfinite(error) else float("inf"))
        return worst

    def time_us(self, launches: list[Any], calls: int = CALLS) -> float:
        """Median microseconds of a call inside a graph of `calls` times the launches."""
        cp, stream = self.cp, self.rig.stream
        with stream:
            stream.begin_capture()
            for launch in launches * calls:
                launch.run(stream.ptr)
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        samples = []
        for _ in range(7):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            samples.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / calls)
        return float(np.median(samples))

    def absorbed_us(self) -> float:
        """tree_mla by the likeliest two configurations, the faster."""
        from runtime.kernels_cu.tree_mla import build_kernels, layer_launch, plan_launch, workspace_bytes

        cp, d, times = self.cp, self.case.absorbed, []
        out = cp.zeros((d.M * d.heads, 512), cp.uint16)
        for config in sorted(candidates(d, self.rig.arch), key=lambda one: predict_absorbed_us(d, one, H200))[:2]:
            kernels = build_kernels(d, config, self.rig.arch, self.rig.sms)
            room = {name: cp.zeros(size, cp.uint8) for name, size in workspace_bytes(d, config, self.rig.sms).items()}
            at = {name: a.data.ptr for name, a in (self.at | room).items()} | {"q": self.at["absorbed"].data.ptr, "out": out.data.ptr}
            plan_launch(kernels, at).run(self.rig.stream.ptr)
            times.append(self.time_us([layer_launch(kernels, at, SCALE, slots=self.dims.S)]))
        return min(times)


def measure(options: argparse.Namespace) -> None:
    import cupy as cp

    from tools.bench_mla import source_digest
    from tools.bench_moe import provenance
    from tools.chunk_rig import Chunks
    from tools.moe_rig import Rig

    rig = Rig()
    print("heads  rows    ctx  absorbed       us   expand   attend  floor_us  share   gain")
    for case in map(parse_case, options.cases.split(",")):
        bench, best = Bench(rig, case), None
        for config in (family.Config(ping_pong=False), family.Config()):
            chunks = Chunks(bench.dims, bench.at, LEAST, SCALE, config)
            bench.at["value"][...] = 0xFFFF  # not what the other configuration left
            cp.cuda.Device().synchronize()
            chunks.run(rig.stream)
            error = bench.error()
            if not error < MAX_ERROR:
                print(f"  {config}: WRONG, relative error {error:.2e}; not timed", flush=True)
                continue
            both, expand = bench.time_us([chunks.expand, chunks.attend]), bench.time_us([chunks.expand])
            attend, plan = bench.time_us([chunks.attend]), bench.time_us([chunks.plan], 16)
            print(f"  {config}: {both:.1f} us, plan {plan:.1f} us, error {error:.1e}", flush=True)
            if best is None or both < best[0]:
                best = both, expand, attend, plan, error, config
        if best is None:
            raise SystemExit(f"{case}: no configuration was right")
        us, expand, attend, plan, error, config = best
        absorbed, cost = bench.absorbed_us(), OPS["chunk_attention"].cost(case.symbols)
        floor = cost.floor_us(H200)
        found = f"{us:9.1f}{expand:9.1f}{attend:9.1f}{floor:10.1f}{floor / us:7.3f}{absorbed / us:7.2f}"
        print(f"{case.heads:5d}{case.rows:6d}{case.ctx:7d}{absorbed:10.1f}{found}", flush=True)
        if options.json:
            record = {
                "schema": 1, **asdict(case), "us": round(us, 2), "expand_us": round(expand, 2), "attend_us": round(attend, 2),
                "absorbed_us": round(absorbed, 2), "floor_us": round(floor, 2), "share": round(floor / us, 4),
                "tflops": round(cost.flops / us * 1e-6, 1), "plan_us": round(plan, 2), "error": float(f"{error:.2e}"), "calls": CALLS,
                "config": asdict(config), **provenance(options.commit), "src": source_digest(family.ATTEND),
            }  # fmt: skip
            options.json.parent.mkdir(parents=True, exist_ok=True)
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        del bench, chunks
        cp.get_default_memory_pool().free_all_blocks()


def predict(options: argparse.Namespace) -> None:
    print("PREDICTED for one H200; nothing was run\nheads  rows    ctx  absorbed       us   expand   attend  floor_us")
    for case in map(parse_case, options.cases.split(",")):
        expand, attend = family.predict_us(case.heads, case.rows, case.ctx, H200)
        absorbed = min(predict_absorbed_us(case.absorbed, one, H200) for one in candidates(case.absorbed))
        floor = OPS["chunk_attention"].cost(case.symbols).floor_us(H200)
        rest = f"{absorbed:10.1f}{expand + attend:9.1f}{expand:9.1f}{attend:9.1f}{floor:10.1f}"
        print(f"{case.heads:5d}{case.rows:6d}{case.ctx:7d}{rest}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="heads x rows x context, comma-separated")
    parser.add_argument("--json", type=Path, help="append a record a case")
    parser.add_argument("--predict", action="store_true", help="predicted times, without a GPU")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    options = parser.parse_args(arguments)
    (predict if options.predict else measure)(options)


if __name__ == "__main__":
    main()
