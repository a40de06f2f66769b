#!/usr/bin/env python3
"""Times the sum over GPU ranks against NCCL in the same run, correctness first: M x 7168 bf16, in graphs of 20.

    python tools/bench_allreduce.py                                               # two GPUs, a table
    python tools/bench_allreduce.py --ranks 4 --json tools/results/allreduce_h200x4.jsonl

A record: ranks, M, bytes, ours_us (the fastest of one_shot and two_shot), nccl_us, fused_us (with residual and norm), apart_us (the sum
by the fastest way, then add_rms_norm), and what each configuration took. trials: one_shot with 1, 2, 4 and 7 blocks a row (norm_7),
with its code rehearsed (rehearsed, norm_rehearsed), and without a norm in the clusters that one has (clustered); none counts as ours
or fused. Parts are zeros while they are timed: sums in place would pass all numbers within 128 calls, and what is infinite takes slower
ways through roots and quotients. NVLink multicast stays off, for NCCL too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ml_dtypes
import numpy as np

from runtime.shared_comm import SharedComm
from tools.rank_rig import Chain, add_rank_options, join, run_ranks

HIDDEN = 7168
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
EPS = 1e-5
PARTS = (1, 2, 4, 7)
ROUNDS = 3  # of every measurement; the median counts


def part_of(rank: int, rows: int) -> np.ndarray:
    return np.random.default_rng([rank, rows]).standard_normal((rows, HIDDEN), np.float32).astype(ml_dtypes.bfloat16)


def sum_of(world: int, rows: int) -> np.ndarray:
    total = part_of(0, rows).astype(np.float32)
    for rank in range(1, world):
        total += part_of(rank, rows).astype(np.float32)
    return total.astype(ml_dtypes.bfloat16)


class Bench:
    """One rank's part; all ranks make the same calls."""

    def __init__(self, rank: int, world: int, host: SharedComm) -> None:
        from runtime.kernels_cu import all_reduce, peers_cuda
        from runtime.kernels_cu.backend import CudaBackend
        from runtime.kernels_cu.device import CupyDevice

        self.rank, self.world, self.host, self.peers = rank, world, host, peers_cuda
        self.device = CupyDevice(rank)
        self.ops = CudaBackend(self.device)
        self.nccl = peers_cuda.NcclGroup(host)
        self.configs = all_reduce.candidates(world, HIDDEN, self.device.sms, self.device.arch)
        memory = peers_cuda.open_memory(self.ops, host, HIDDEN, self.configs[0])
        if memory is None:
            raise SystemExit("bench_allreduce: a GPU can not reach its peer's memory; NCCL alone would be used")
        self.memory = memory
        for config in self.configs:
            self.device.functions(all_reduce.SOURCE, config.defines(HIDDEN), all_reduce.ENTRIES)
        host.gather_bytes(b"\0")  # all are compiled: nobody waits for a compiler on the device
        most = 2 * max(ROWS) * HIDDEN
        self.part, self.x, self.out, self.w = (self.device.alloc(n) for n in (most, most, most, 2 * HIDDEN))
        self.weight = np.random.default_rng(7).standard_normal(HIDDEN, np.float32).astype(ml_dtypes.bfloat16)
        self.device.upload(self.w, self.weight.view(np.uint16))
        self.norm = all_reduce.Norm(self.x, self.w, self.out, EPS)
        self.refused: set[int] = set()
        for n in PARTS if self.configs[0].clusters else ():
            try:  # a device need not know clusters of every size; ranks have the same devices
                self.run_of(peers_cuda.ONE, 1, replace(self.configs[0], parts=n), True).run(self.device.stream)
            except Exception as error:
                self.refused.add(n)
                print(f"rank {rank}: no clusters of {n}: {error}", flush=True)
        self.device.synchronize()

    def run_of(self, way: str, rows: int, config: Any = None, norm: bool = False) -> Any:
        if way == self.peers.LARGE:
            return self.nccl.all_reduce(self.part, rows * HIDDEN)
        memory = replace(self.memory, config=config or self.configs[0])
        return memory.shot(self.device, way, rows, self.part, self.norm if norm else None)

    def ways(self, rows: int) -> list[str]:
        limits = {self.peers.ONE: self.configs[0].blocks, self.peers.TWO: self.configs[0].rows}
        return [way for way, most in limits.items() if rows <= most]

    def check(self, rows: int) -> None:
        """Every element of every way and configuration, alone and with the norm; raises SystemExit naming the first that is wrong."""
        want, residual = sum_of(self.world, rows), part_of(99, rows)
        total = (residual.astype(np.float32) + want.astype(np.float32)).astype(ml_dtypes.bfloat16)
        wide = total.astype(np.float32)
        normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * self.weight.astype(np.float32)
        self.put(rows, residual)
        Chain((self.run_of(self.ways(rows)[-1], rows), self._add_norm(rows))).run(self.device.stream)
        apart = self.get(self.out, rows)
        ways, trials = self.ways(rows), self.trials(rows)
        for config, norms in [(config, (False, True)) for config in self.configs] + [(one, (n,)) for _, one, n in trials]:
            for way in ways if config in self.configs else ways[:1]:
                for norm in norms:
                    self.put(rows, residual)
                    self.run_of(way, rows, config, norm).run(self.device.stream)
                    how = f"{', normed' if norm else ''}, {config.parts or 'the usual'} blocks a row, {config.rehearsals} rehearsals"
                    name = f"rank {self.rank}: {way} of {rows} rows, {config.threads} x {config.vecs}{how}"
                    if not norm:
                        self.equal(name, self.get(self.part, rows), want)
                        continue
                    self.equal(name, self.get(self.x, rows), total)
                    error = np.abs(self.get(self.out, rows).astype(np.float32) - normed) / (1 + np.abs(normed))
                    if not error.max() < 0.02:
                        raise SystemExit(f"bench_allreduce: {name}: off by {error.max():.4f}")
                    self.equal(f"{name}, against two kernels", self.get(self.out, rows), apart)
        self.put(rows, residual)
        self.run_of(self.peers.LARGE, rows).run(self.device.stream)
        off = np.abs(self.get(self.part, rows).astype(np.float32) - want.astype(np.float32)).max()
        if not off <= 0.125:  # rounded at every hop
            raise SystemExit(f"bench_allreduce: rank {self.rank}: nccl of {rows} rows: off by {off:.4f}")

    def trials(self, rows: int) -> list[tuple[str, Any, bool]]:
        """one_shot as it is not used: the name, the configuration, whether normed."""
        first = self.configs[0]
        if rows > first.blocks:
            return []
        found = [(f"{'norm_' * norm}rehearsed", replace(first, rehearsals=1), norm) for norm in (False, True)]
        if first.clusters:
            shared = [n for n in PARTS if rows * n <= first.blocks and HIDDEN // 8 % (32 * n) == 0 and n not in self.refused]
            found += [(f"norm_{n}", replace(first, parts=n), True) for n in shared]
        return found

    def put(self, rows: int, residual: np.ndarray) -> None:
        self.device.upload(self.part, part_of(self.rank, rows).view(np.uint16))
        self.device.upload(self.x, residual.view(np.uint16))
        self.host.gather_bytes(b"\0")

    def get(self, address: int, rows: int) -> np.ndarray:
        found = np.empty((rows, HIDDEN), np.uint16)
        self.device.download(address, found)
        return found.view(ml_dtypes.bfloat16)

    def equal(self, name: str, got: np.ndarray, want: np.ndarray) -> None:
        wrong = np.flatnonzero((got.view(np.uint16) != want.view(np.uint16)).any(axis=1))
        if len(wrong):
            raise SystemExit(f"bench_allreduce: {name}: {len(wrong)} rows have other bits than they should, the first is {wrong[0]}")

    def us(self, *runs: Any) -> float:
        """Microseconds of the runs one after another, the slowest rank's, the median of three."""
        chain = Chain(runs) if len(runs) > 1 else runs[0]
        return sorted(self.peers._slowest(self.host, self.peers.time_us(self.device.stream, chain)) for _ in range(ROUNDS))[ROUNDS // 2]

    def measure(self, rows: int) -> dict[str, Any]:
        self.device.upload(self.part, np.zeros((rows, HIDDEN), np.uint16))
        by_config: dict[str, dict[str, float]] = {}
        for config in self.configs:
            name = f"{config.threads}x{config.vecs}"
            by_config[name] = {way: round(self.us(self.run_of(way, rows, config)), 2) for way in self.ways(rows)}
            by_config[name] |= {f"{way}_norm": round(self.us(self.run_of(way, rows, config, True)), 2) for way in self.ways(rows)}
        trials = {name: round(self.us(self.run_of(self.peers.ONE, rows, one, norm)), 2) for name, one, norm in self.trials(rows)}
        if trials and self.configs[0].clusters:
            clusters = self.run_of(self.peers.ONE, rows, norm=True).cluster
            trials["clustered"] = round(self.us(replace(self.run_of(self.peers.ONE, rows), cluster=clusters)), 2)
        nccl = self.us(self.run_of(self.peers.LARGE, rows))
        plain = {(name, way): found[way] for name, found in by_config.items() for way in self.ways(rows)}
        best = min(plain, key=lambda key: plain[key])
        config = next(c for c in self.configs if f"{c.threads}x{c.vecs}" == best[0])
        fastest = self.run_of(best[1], rows, config) if plain[best] <= nccl else self.run_of(self.peers.LARGE, rows)
        fused = min(found[f"{way}_norm"] for found in by_config.values() for way in self.ways(rows))
        apart = round(self.us(fastest, self._add_norm(rows)), 2)
        return {
            "ranks": self.world, "M": rows, "bytes": 2 * rows * HIDDEN,
            "ours_us": plain[best], "nccl_us": round(nccl, 2), "fused_us": fused, "apart_us": apart,
            "way": best[1], "config": best[0], "configs": by_config, "trials": trials,
        }  # fmt: skip

    def _add_norm(self, rows: int) -> Any:
        from runtime.kernels_cu import dense

        config = dense.candidates(HIDDEN)[0]
        call = dense.add_rms_norm(config, rows, HIDDEN, EPS, x=self.x, delta=self.part, w=self.w, out=self.out)
        return self.device.prepare(call, self.device.functions(dense.SOURCE, config.defines(), dense.ENTRIES))


def run_rank(args: argparse.Namespace) -> int:
    host = join(args)
    bench = Bench(args.rank, args.ranks, host)
    for rows in args.rows:
        bench.check(rows)
        host.gather_bytes(b"\0")
    source: dict[str, Any] = {}
    if args.rank == 0:
        from runtime.kernels_cu._build import digest
        from runtime.kernels_cu.all_reduce import SOURCE
        from tools.bench_moe import provenance

        source = provenance(args.commit) | {"src": digest(SOURCE)}
        print("    M      bytes   ours     by          nccl  fused  apart   (µs)")
    for rows in args.rows:
        found = bench.measure(rows)
        if args.rank == 0:
            cells = (found["ours_us"], f"{found['way']} {found['config']}", found["nccl_us"], found["fused_us"], found["apart_us"])
            print("{:5d} {:10,d} {:6.2f}  {:16} {:6.2f} {:6.2f} {:6.2f}".format(rows, found["bytes"], *cells), flush=True)
            if args.json:
                with args.json.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"schema": 1, **found, **source}) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="M", help="rows of a message")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each M")
    parser.add_argument("--commit", default="", help="what to record as the commit")
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    if not 2 <= args.ranks <= 8 or not all(1 <= rows <= max(ROWS) for rows in args.rows):
        parser.error(f"--ranks is 2 to 8, --rows at most {max(ROWS)}")
    return run_rank(args) if args.rank >= 0 else run_ranks(__file__, args, given)


if __name__ == "__main__":
    sys.exit(main())
