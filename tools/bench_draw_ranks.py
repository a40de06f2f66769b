#!/usr/bin/env python3
"""Times, correctness first, draws from shares of a vocabulary against gathered logits, and the product q_a, kv_a cut or whole.

    python tools/bench_draw_ranks.py                                              # two GPUs, two tables
    python tools/bench_draw_ranks.py --ranks 4 --json tools/results/draw_ranks_h200x4.jsonl

draw: M rows of 163,840 logits, in graphs of 20. shares_us: sample_ranks.cu; gathered_us: the gather by NCCL, then sample.cu over the whole.
Tokens of both are compared with the definition's, on every rank. latent: the product 7168 x 2112 of M rows; whole_us: of replicated
weights; cut_us: a rank's part, then the gather, by packets where they have room (gather_ranks.cu); large_us: the same through NCCL.
Weights are cold: each launch takes another copy, 128 MB of them in all. In whole steps: tools/bench_step_ranks.py --cut-latent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from runtime.kernels_np.sample import sample as define
from runtime.shared_comm import SharedComm
from runtime.types import StepPlan
from tools.rank_rig import Chain, add_rank_options, join, run_ranks

VOCAB, HIDDEN, LATENT = 163_840, 7168, 2112
COLD_BYTES = 128_000_000  # more than twice an H200's L2
ROWS, ROUNDS, TOP = (1, 8, 64, 256), 3, 20
PRODUCT_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024)
WAYS: dict[str, dict[str, float]] = {
    "argmax": {"temperature": 0.0}, "draw": {}, "min_p": {"min_p": 0.05}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.95},
    "all": {"temperature": 0.8, "top_k": 64, "min_p": 0.001, "top_p": 0.9, "logprobs": 5},
}  # fmt: skip
DTYPES = {
    "out_rows": np.int32, "seq": np.int32, "pos": np.int32, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32,
    "top_k": np.int32, "seed": np.uint64, "logprobs": np.int32, "adjust_seq": np.int32, "adjust_seq_by": np.float32,
    "adjust_row": np.int32, "adjust_row_by": np.float32, "mask_rows": np.int32, "masks": np.uint32,
}  # fmt: skip


def drawing_of(rows: int, way: Mapping[str, float]) -> dict[str, np.ndarray]:
    """A sequence a row, without tables."""
    every, pairs = np.arange(rows), np.zeros((0, 2))
    given: dict[str, Any] = {
        "out_rows": every, "seq": every, "pos": 100 + every, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": every + 7,
        "logprobs": -1, "adjust_seq": pairs, "adjust_seq_by": pairs, "adjust_row": pairs, "adjust_row_by": pairs,
        "mask_rows": np.zeros(0), "masks": np.zeros((0, VOCAB // 32)),
    } | way  # fmt: skip
    return {name: np.array(given[name] if np.shape(given[name]) else np.full(rows, given[name]), kind) for name, kind in DTYPES.items()}


class Bench:
    """One rank's part; all ranks make the same calls."""

    def __init__(self, rank: int, world: int, host: SharedComm, peers: Any, device: Any) -> None:
        from runtime.kernels_cu.backend import CudaBackend

        self.rank, self.world, self.host, self.peers, self.device = rank, world, host, peers, device
        self.ops = CudaBackend(device)
        self.comm = peers.open_peers(self.ops, host, HIDDEN)
        if not (self.comm._memory and self.comm._memory.seat):
            raise SystemExit("bench_draw_ranks: a GPU can not reach its peer's memory; logits would be gathered")
        self.apart = type(self.comm)(self.ops, rank, world, self.comm._large, None)
        self.empty = np.zeros(1, np.int32)

    def put(self, array: np.ndarray) -> Any:
        from runtime.kernels_cu.array import DeviceArray, dtype_name

        there = DeviceArray(self.device.alloc(array.nbytes), tuple(array.shape), dtype_name(array))
        if array.nbytes:
            self.device.upload(there.address, np.ascontiguousarray(array))
        return there

    def us(self, runs: Sequence[Any]) -> float:
        """Microseconds of the runs one after another, the slowest rank's, the median of three."""
        found = sorted(self.peers._slowest(self.host, self.peers.time_us(self.device.stream, Chain(runs))) for _ in range(ROUNDS))
        return round(found[ROUNDS // 2], 2)

    def draw(self, rows: int, way: str) -> dict[str, Any]:
        from runtime.kernels_cu.recorder import Live

        logits = 4 * np.random.default_rng(rows).standard_normal((rows, VOCAB), np.float32)
        share, fields = VOCAB // self.world, drawing_of(rows, WAYS[way])
        own = self.put(logits[:, self.rank * share : (self.rank + 1) * share])
        there = {name: self.put(array) for name, array in fields.items()}
        plan, none = [there[name] for name in DTYPES], self.put(self.empty).flat
        kinds = {"target": "i32", "logp": "f32", "finite": "bool"}
        out = {name: self.ops.buffer(f"out_{name}", (rows,), kind) for name, kind in kinds.items()}
        out |= {name: self.ops.buffer(f"out_{name}", (rows, TOP), kind) for name, kind in (("top_ids", "i32"), ("top_logp", "f32"))}
        live, times = Live(self.put(np.array([rows], np.int32)).flat, 0, none, none, none), {}
        want = {"target": np.zeros(rows, np.int32), "logp": np.zeros(rows, np.float32), "finite": np.zeros(rows, np.bool_)}
        want |= {"top_ids": np.zeros((rows, TOP), np.int32), "top_logp": np.zeros((rows, TOP), np.float32)}
        define(logits, *StepPlan.drawing.fget(_Fields(fields)), **want)  # type: ignore[attr-defined]
        for name, comm in (("shares_us", self.comm), ("gathered_us", self.apart)):
            with self.ops.recording(live=live) as launches:
                comm.sample(self.ops, own, plan, **out)
                runs = [one.run for one in launches]
            for run in runs:
                run.run(self.device.stream)
            wrong = np.flatnonzero(self.ops.host(out["target"]) != want["target"])
            if len(wrong):
                raise SystemExit(
                    f"bench_draw_ranks: rank {self.rank}, {way}, {rows} rows, {name}: {len(wrong)} tokens differ, first row {wrong[0]}"
                )
            if "logprobs" in WAYS[way]:
                off = np.abs(self.ops.host(out["logp"]) - want["logp"]).max()
                if not off < 2e-5 or (self.ops.host(out["top_ids"]) != want["top_ids"]).any():
                    raise SystemExit(f"bench_draw_ranks: rank {self.rank}, {way}, {rows} rows, {name}: log-probabilities off by {off}")
            times[name] = self.us(runs)
        return {"kind": "draw", "ranks": self.world, "M": rows, "way": way, **times}

    def latent(self, rows: int) -> dict[str, Any]:
        rng = np.random.default_rng(rows)
        x, out = self.ops.buffer("x", (rows, HIDDEN)), self.ops.buffer("out", (rows, LATENT))
        part = self.ops.buffer("part", (rows, LATENT // self.world))
        whole = (rng.standard_normal((LATENT, HIDDEN), np.float32) / 85).view(np.uint32) >> 16
        cut = whole[self.rank * LATENT // self.world : (self.rank + 1) * LATENT // self.world]
        rounded = (rng.standard_normal((rows, HIDDEN), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.device.upload(x.flat, rounded)
        weights = [[self.weight(w.astype(np.uint16)) for _ in range(-(-COLD_BYTES // (2 * w.size)))] for w in (whole, cut)]
        want = np.float32(0) + _f32(rounded) @ _f32(whole.astype(np.uint16)).T
        ways: dict[str, Any] = {"whole_us": None, "cut_us": self.comm, "large_us": self.apart}
        times = {}
        for name, comm in ways.items():
            copies = weights[comm is not None]
            with self.ops.recording() as launches:
                for weight in copies:
                    self.ops.linear(x, weight, out=out if comm is None else part)
                    if comm is not None:
                        comm.all_gather(part, out=out)
                runs = [one.run for one in launches]
            for run in runs:
                run.run(self.device.stream)
            off = np.abs(self.ops.host(out).astype(np.float32) - want).max()
            if not off < 0.1:
                raise SystemExit(f"bench_draw_ranks: rank {self.rank}, latent, {rows} rows, {name}: off by {off}")
            times[name] = round(self.us(runs) / len(copies), 2)
        for copy in (copy for copies in weights for copy in copies):
            self.device.free(copy.address)
        return {"kind": "latent", "ranks": self.world, "M": rows, **times}

    def weight(self, bits: np.ndarray) -> Any:
        import ml_dtypes

        return self.ops.param(bits.view(ml_dtypes.bfloat16))


def _f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class _Fields:
    def __init__(self, fields: Mapping[str, np.ndarray]) -> None:
        self.__dict__ |= fields


def run_rank(args: argparse.Namespace) -> int:
    from runtime.kernels_cu import peers_cuda
    from runtime.kernels_cu.device import CupyDevice
    from tools.bench_moe import provenance

    host = join(args)
    bench = Bench(args.rank, args.ranks, host, peers_cuda, CupyDevice(args.rank))
    source = provenance(args.commit) if args.rank == 0 else {}
    cases = [(bench.draw, (rows, way)) for rows in args.rows for way in WAYS]
    cases += [(bench.latent, (rows,)) for rows in args.product_rows]  # type: ignore[list-item]
    for measure, what in cases:
        host.gather_bytes(b"\0")
        found = measure(*what)  # type: ignore[operator]
        if args.rank:
            continue
        print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
        if args.json:
            with args.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"schema": 1, **found, **source}) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), metavar="M", help="rows drawn")
    parser.add_argument("--product-rows", type=int, nargs="*", default=list(PRODUCT_ROWS), metavar="M", help="rows of the product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each case")
    parser.add_argument("--commit", default="", help="what to record as the commit")
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    if args.ranks not in (2, 4, 8):
        parser.error("--ranks is 2, 4 or 8")
    return run_rank(args) if args.rank >= 0 else run_ranks(__file__, args, given)


if __name__ == "__main__":
    sys.exit(main())
