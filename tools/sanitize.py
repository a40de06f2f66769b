#!/usr/bin/env python3
"""Runs compute-sanitizer over small tests of every kernel family: a table of what each tool found, and a record of each cell.

    python tools/sanitize.py                                        # all tools, all families; needs a GPU and compute-sanitizer
    python tools/sanitize.py --tools racecheck --families tree_mla,moe_w4 --json tools/results/sanitizer_h200.jsonl
    python tools/sanitize.py --list                                 # families and their kernels; no GPU

memcheck counts bad addresses, racecheck hazards in shared memory, initcheck reads of device memory nobody wrote, synccheck barriers
misused. First each tool is run over `planted`, four kernels with one fault each: a tool that does not find its own is blind, and is
left out of the rest. Then every family runs without a tool, in both builds, so that kernels are compiled once, a broken test is not
taken for a finding, and a kernel that its family (`tools/sanitize_families.py`) did not launch is named; then tools and families run
side by side, a process each. What has not run when the time is up is recorded as such, and is no success.

racecheck does not follow a __syncwarp before a single lane's arrival at an mbarrier and would report each: it gets builds in which
all lanes arrive (EVERY_LANE_ARRIVES=1). linear_stream.cu, linear_carried.cu and chunk_*.cu have none: tensor copies, or copies of
which each lane tells, fill their rings and wgmma alone reads them. It and synccheck get a few barriers said otherwise:
`tools/sanitize_families.py` has them in EDITS, with the reasons, and shipped sources stay as they are. CuPy's memory pool is off, so
that memcheck sees where an array ends. The kernels that ranks meet in run in two processes of one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_moe import provenance
from tools.gpu_tests import kernels_digest
from tools.sanitize_families import FAMILIES, not_launched

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tools" / "results" / "sanitizer_h200.jsonl"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLANTED = "planted"
PLAIN, LANES = "plain", "all lanes"  # columns without a tool: as built by default, and as racecheck gets it
WITH_LANES = ("moe_w4", "tree_mla", "trials", "tree_paths", "ranks", "model")  # families that have such builds
START = """import sys, cupy, pytest
from tools.sanitize_families import note_launches
cupy.cuda.set_allocator(None)
note_launches()
sys.exit(pytest.main(sys.argv[1:]))"""
FAULTS = r"""
extern "C" __global__ void memcheck(int* a) { a[threadIdx.x + (1 << 20)] = 1; }
extern "C" __global__ void racecheck(int* a) { __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; a[threadIdx.x] = s[threadIdx.x ^ 32]; }
extern "C" __global__ void initcheck(int* a) { a[threadIdx.x] += 1; }
extern "C" __global__ void synccheck(int* a) { if (threadIdx.x < 40) __syncthreads(); a[threadIdx.x] = 1; }
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What a tool said of a family. state: done, timeout, failed (tests, or no summary) or not run; first: its first message."""

    tool: str
    family: str
    state: str
    errors: int = 0
    hazards: int = 0
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    first: str = ""

    @property
    def clean(self) -> bool:
        return self.state == "done" and not self.errors and not self.hazards

    @property
    def cell(self) -> str:
        if self.state != "done":
            return self.state
        return f"{self.hazards} hazards" if self.tool == "racecheck" else f"{self.errors} errors"


def read_log(text: str) -> tuple[int, int, str] | None:
    """(errors, hazards, first messages) of compute-sanitizer's log; None where it has no summary, so the tool did not end."""
    races = re.findall(r"RACECHECK SUMMARY: (\d+) hazards?", text)
    errors = re.findall(r"ERROR SUMMARY: (\d+) errors?", text)
    if not races and not errors:
        return None
    lines = [line.lstrip("= ").strip() for line in text.splitlines() if line.startswith("=========")]
    said = [
        line for line in lines if line and not re.match(r"COMPUTE-SANITIZER|(RACECHECK|ERROR|LEAK) SUMMARY|Host Frame|Saved host", line)
    ]
    return sum(map(int, errors)), sum(map(int, races)), " | ".join(list(dict.fromkeys(said))[:12])[:1600]


def read_counts(text: str) -> tuple[int, int]:
    """(passed, failed) of pytest's last line."""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", text.strip().rpartition("\n")[2])}
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)


def command_of(family: str, tool: str) -> list[str]:
    """What runs a family's tests in one process."""
    if family == PLANTED:
        return [sys.executable, str(Path(__file__).resolve()), "--plant", tool]
    file, expression = FAMILIES[family].file, FAMILIES[family].chosen
    return [sys.executable, "-c", START, "-q", "-m", "gpu", "-p", "no:cacheprovider", file, *(["-k", expression] if expression else [])]


def run_one(sanitizer: str, tool: str, family: str, end: float) -> Found:
    """One process, with a tool or without (PLAIN, LANES), that ends by `end` of the monotonic clock."""
    begin = time.monotonic()
    if begin >= end:
        return Found(tool, family, "not run")
    alone = tool in (PLAIN, LANES)
    environment = {**os.environ, **({"EVERY_LANE_ARRIVES": "1"} if tool in ("racecheck", LANES) else {})}
    if tool != PLAIN and family != PLANTED:
        environment["SANITIZED"] = "racecheck" if tool == LANES else tool
    with tempfile.TemporaryDirectory() as folder:
        log, notes, command = Path(folder) / "log", Path(folder) / "launched", command_of(family, tool)
        if alone:
            environment["LAUNCHED"] = str(notes)
        else:  # all: a test may start ranks
            options = ("--print-limit", "20", "--log-file", str(log), "--target-processes", "all")
            command = [sanitizer, "--tool", tool, *options, *command]
        pipe = subprocess.PIPE
        popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            out, err = popen.communicate(timeout=end - begin)
        except subprocess.TimeoutExpired:
            os.killpg(popen.pid, signal.SIGKILL)  # the tool and what it runs
            popen.communicate()
            return Found(tool, family, "timeout", seconds=round(time.monotonic() - begin, 1))
        said = (0, 0, "") if alone else read_log(log.read_text(errors="replace") if log.exists() else "")
        missed = not_launched(family, notes) if alone else []
    passed, failed = (1, 0) if family == PLANTED else read_counts(out)
    state = "done" if said and passed and not failed and not missed else "failed"
    errors, hazards, first = said or (0, 0, "")
    last = f"not launched: {', '.join(missed)}" if missed and passed and not failed else (err or out).strip().rpartition("\n")[2]
    seconds = round(time.monotonic() - begin, 1)
    return Found(tool, family, state, errors, hazards, passed, failed, seconds, first or ("" if state == "done" else last[:400]))


def run_all(sanitizer: str, tools: Sequence[str], families: Sequence[str], limit_s: float, workers: int) -> list[Found]:
    """First every tool over the fault that is its own: on machines that have the program and not what it needs all are blind, and
    nothing else is run. Then every family alone, then every tool that sees over every family."""
    end = time.monotonic() + limit_s
    with ThreadPoolExecutor(workers) as pool:
        planted = list(pool.map(lambda tool: run_one(sanitizer, tool, PLANTED, end), tools))
        seeing = [found.tool for found in planted if finds(found)]
        blind = [Found(tool, family, "not run") for tool in tools if tool not in seeing for family in families]
        if not seeing:
            return planted + blind
        cells = [(PLAIN, family) for family in families]
        cells += [(LANES, family) for family in families if family in WITH_LANES and "racecheck" in seeing]
        alone = list(pool.map(lambda cell: run_one(sanitizer, *cell, end), cells))
        cells = [(tool, family) for family in families for tool in seeing]
        return planted + alone + list(pool.map(lambda cell: run_one(sanitizer, *cell, end), cells)) + blind


def finds(planted: Found) -> bool:
    """Whether a tool has found its own fault."""
    return planted.state == "done" and planted.errors + planted.hazards > 0


def table(found: Sequence[Found], tools: Sequence[str]) -> str:
    """Tools across, families down."""
    by = {(f.tool, f.family): f for f in found}
    columns = (PLAIN, LANES, *tools)
    lines = [f"{'':15}" + "".join(f"{tool:>14}" for tool in columns)]
    for family in dict.fromkeys(f.family for f in found):
        cells = [by.get((tool, family)) for tool in columns]
        words = ["" if c is None else f"{c.passed} passed" if c.tool in (PLAIN, LANES) and c.clean else c.cell for c in cells]
        lines.append(f"{family:15}" + "".join(f"{word:>14}" for word in words))
    return "\n".join(lines)


def verdict(found: Sequence[Found]) -> list[str]:
    """What is wrong, a sentence each."""
    bad = []
    for f in found:
        if f.family == PLANTED:
            if not finds(f):
                bad.append(f"{f.tool} is blind: {f.cell} where a fault is planted {f.first}")
        elif not f.clean:
            bad.append(f"{f.tool} over {f.family}: {f.cell} ({f.first})")
    return bad


def plant(tool: str) -> int:
    """Runs the kernel with the fault that a tool must find."""
    import cupy

    cupy.cuda.set_allocator(None)
    room = cupy.empty(64, cupy.int32)
    cupy.RawModule(code=FAULTS).get_function(tool)((1,), (64,), (room,))
    try:
        cupy.cuda.Stream.null.synchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:  # memcheck ends the context
        print(error)
    return 0


def find_sanitizer(given: str | None) -> str | None:
    """The program's path: as given, on PATH, in CUDA's folder, or from a package."""
    places: list[str | None] = [given, shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    places += [str(path) for folder in sys.path for path in sorted(Path(folder).glob("nvidia/*/bin/compute-sanitizer"))]
    return next((place for place in places if place and Path(place).is_file()), None)


def chosen(given: str, known: Mapping[str, object] | Sequence[str], option: str) -> list[str]:
    names = given.split(",") if given else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option}: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="", help=f"comma-separated (default {','.join(TOOLS)})")
    parser.add_argument("--families", default="", help=f"comma-separated (default {','.join(FAMILIES)})")
    parser.add_argument("--limit", type=float, default=290.0, metavar="S", help="seconds for all (default 290)")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--sanitizer", metavar="PATH", help="compute-sanitizer, where it is not found")
    parser.add_argument("--json", type=Path, default=RECORDS, help="where records are appended")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--list", action="store_true", help="print the families and their kernels")
    parser.add_argument("--plant", choices=TOOLS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.plant:
        return plant(options.plant)
    if options.list:
        print("\n".join(f"{name:14} {family.file} {family.chosen!r}: {' '.join(family.kernels)}" for name, family in FAMILIES.items()))
        return 0
    try:
        tools, families = chosen(options.tools, TOOLS, "--tools"), chosen(options.families, FAMILIES, "--families")
        sanitizer = find_sanitizer(options.sanitizer)
        if sanitizer is None:
            raise ValueError("compute-sanitizer was not found: CUDA's toolkit has it; give --sanitizer PATH")
    except ValueError as error:
        print(f"sanitize: error: {error}", file=sys.stderr)
        return 2
    found = run_all(sanitizer, tools, families, options.limit, options.workers)
    made = provenance(options.commit) | {"kernels": kernels_digest()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with options.json.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"schema": 1, **asdict(f), **made}) + "\n" for f in found)
    bad = verdict(found)
    print("\n".join([table(found, tools), *bad]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
