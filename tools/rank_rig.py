"""For benches that run on several GPUs: the tool starts itself once for each rank, and ranks meet in shared memory."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm

DEADLINE_S = 300.0  # that a rank waits for another


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, from the first on (default 2)")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--block", default="", help=argparse.SUPPRESS)


def join(args: argparse.Namespace) -> SharedComm:
    """How this rank reaches the others before their devices do."""
    block = SharedBlock.open(args.block)
    return SharedComm(args.rank, args.ranks, block, LINE, Watch(block, 0, DEADLINE_S))


def run_ranks(script: str | Path, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs `script argv` once for each rank. Returns 0, or the exit code of the first that fails; the others are ended then."""
    block = SharedBlock.create(LINE + SharedComm.nbytes(args.ranks))
    watch = Watch(block, 0, DEADLINE_S)
    command = [sys.executable, str(Path(script).resolve()), *argv, "--block", block.path]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(args.ranks)]
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [i for i, rank in enumerate(ranks) if rank.poll()]
            if failed:
                watch.declare(failed[0])
                break
            try:
                next(rank for rank in ranks if rank.poll() is None).wait(0.2)
            except (subprocess.TimeoutExpired, StopIteration):
                continue
        codes = [code for rank in ranks if (code := rank.poll())]
        return abs(codes[0]) if codes else 0
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()


class Chain:
    """Prepared launches one behind the other, run as one."""

    def __init__(self, runs: Sequence[Any]) -> None:
        self._runs = runs

    def run(self, stream: int) -> None:
        for run in self._runs:
            run.run(stream)
