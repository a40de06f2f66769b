#!/usr/bin/env python3
"""Runs the tests marked `gpu` and records what they showed, one line a test file.

    python tools/gpu_tests.py                                        # all of them
    python tools/gpu_tests.py tests/runtime/kernels_cu/test_moe_w4_gpu.py --json tools/results/gpu_tests.jsonl

A record holds the counts, the failures by name, and a digest of the kernels' sources: `--check` compares the last record of
each file with the sources as they are and lists what has changed since, without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_moe import provenance

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tools" / "results" / "gpu_tests.jsonl"
COUNTED = ("passed", "failed", "skipped")


class Outcomes:
    """A pytest plugin: outcomes by file."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0) | {"seconds": 0.0, "failures": []})

    def pytest_runtest_logreport(self, report: Any) -> None:
        found = self.files[report.nodeid.partition("::")[0]]
        found["seconds"] += report.duration
        broken = report.failed and report.when != "call"
        if report.when == "call" or broken or (report.skipped and report.when == "setup"):
            found["failed" if report.failed else report.outcome] += 1
        if report.failed:
            found["failures"].append(report.nodeid.partition("::")[2])


def kernels_digest() -> str:
    """Twelve hex digits of every kernel source and header."""
    folder = ROOT / "runtime" / "kernels_cu"
    h = hashlib.sha256()
    for file in sorted((*folder.glob("*.cu"), *folder.glob("prim/*.cuh"))):
        h.update(file.name.encode() + b"\0" + file.read_bytes())
    return h.hexdigest()[:12]


def run(paths: list[str], where: Path, commit: str, workers: int) -> int:
    """Pytest's exit status; a record of every file is appended to `where`."""
    import pytest

    outcomes = Outcomes()
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    status = int(pytest.main(["-q", "-m", "gpu or multi_gpu", "-p", "no:cacheprovider", *spread, *paths], plugins=[outcomes]))
    made = provenance(commit) | {"kernels": kernels_digest()}
    where.parent.mkdir(parents=True, exist_ok=True)
    with where.open("a") as file:
        for name, found in sorted(outcomes.files.items()):
            if found["passed"] or found["failed"]:
                file.write(json.dumps({"schema": 1, "file": name, **found, "seconds": round(found["seconds"], 1), **made}) + "\n")
    return status


def check(where: Path) -> int:
    """Prints the last record of each file, and whether the kernels are still the ones it was made with."""
    last = {row["file"]: row for row in map(json.loads, where.read_text().splitlines())} if where.exists() else {}
    now = kernels_digest()
    for name, row in sorted(last.items()):
        state = "as recorded" if row["kernels"] == now else "kernels changed since: unverified"
        counts = ", ".join(f"{row[kind]} {kind}" for kind in COUNTED)
        print(f"{name}: {counts} on {row['gpu']}, {row['date']}, {row['commit']}; {state}")
    return 0 if last else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"], help="test files; all by default")
    parser.add_argument("--json", type=Path, default=RECORDS, help="where records are appended")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU (pytest-xdist): kernels compile side by side")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--check", action="store_true", help="print the records and what has changed since")
    options = parser.parse_args(arguments)
    return check(options.json) if options.check else run(options.paths, options.json, options.commit, options.workers)


if __name__ == "__main__":
    sys.exit(main())
