#!/usr/bin/env python3
"""Makes the GPU records again, one after the other, within a given time.

    python tools/measure.py --list                                  # what there is, and what has changed since it was recorded; no GPU
    python tools/measure.py --minutes 9                             # everything that needs one GPU
    python tools/measure.py --gpus 2 --only allreduce,step2         # some of what needs two
    python tools/measure.py --stale --out /tmp/new --pack /tmp/new.tar

Nothing is begun where there are fewer GPUs than the steps need. Steps stand in the order in which later figures rest on earlier
ones: tests, then kernels, then whole steps, then serving. A step that fails, or ends without a record, does not stop the others;
one that does not fit in the time left is named and left out. What a kernel includes counts as its source.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.cuda_loading import gpu_count
from runtime.kernels_cu._build import include_closure

RESULTS = ROOT / "tools" / "results"
K26 = ("kimi-k26", "--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": %d}')
DRAFTER = ("--spec-model", "model/configs/kimi-k26-dflash.json")
KERNELS = "runtime/kernels_cu"
ATTENTION = (f"{KERNELS}/tree_mla.cu", f"{KERNELS}/tree_mla_rows.cu", f"{KERNELS}/tree_mla_config.py")


@dataclass(frozen=True, slots=True)
class Step:
    """One record and how it is made. seconds: what it takes on an H200, compilation included; {out} in argv is the record's folder."""

    name: str
    record: str
    seconds: float
    argv: tuple[str, ...]
    sources: tuple[str, ...]  # what the record speaks of; with a .cu all that it includes
    gpus: int = 1

    @property
    def words(self) -> frozenset[str]:
        """What its command holds, but for the places of its results."""
        return frozenset(word for part in self.argv if "{out}" not in part for word in part.split())

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources and what they include."""
        kernels = [path.removeprefix(f"{KERNELS}/") for path in self.sources if path.endswith(".cu")]
        included = {f"{KERNELS}/{name}" for kernel in kernels for name in include_closure(kernel)}
        return (*self.sources, *sorted(included))


def k26(layers: int) -> tuple[str, ...]:
    """Arguments that build so many layers of K2.6 from random weights."""
    return (*K26[:-1], K26[-1] % layers)


STEPS = (
    Step("kernels", "gpu_tests", 70, ("tools/gpu_tests.py", "tests/runtime/kernels_cu", "--workers", "9"), (KERNELS,)),
    Step("graphs", "gpu_tests", 30, ("tools/gpu_tests.py", "tests/runtime/graph"), (KERNELS, "runtime/graph")),
    Step(
        "products", "linear_h200", 140,
        ("tools/bench_linear.py", "--tune", "--kernels", "stream", "--tp", "1,2,8", "--m", "1,8,16,64", "--calls", "24",
         "--tuned", "{out}/tuned.json"),
        (f"{KERNELS}/linear_stream.cu", f"{KERNELS}/linear_carried.cu", f"{KERNELS}/linear_stream.py"),
    ),
    Step("trials", "mla_variants_h200", 60, ("tools/bench_mla.py", "--variants", "--seconds", "140"), ATTENTION),
    Step("attention", "mla_h200", 60, ("tools/bench_mla.py", "--most", "4"), ATTENTION),
    Step(
        "prefill", "prefill_h200", 30, ("tools/bench_prefill.py",),
        tuple(f"{KERNELS}/{name}" for name in ("chunk_plan.cu", "chunk_expand.cu", "chunk_attention.cu", "chunk_attention.py")),
    ),
    Step(
        "experts", "moe_h200", 120, ("tools/bench_moe.py",),
        tuple(f"{KERNELS}/{name}" for name in ("moe_w4.cu", "moe_route.cu", "moe_config.py")),
    ),
    Step("step", "step_h200", 70, ("tools/bench_step.py", "--ops"), (KERNELS, "runtime/graph", "model/kimi_k26.py")),
    Step("host", "host_h200", 40, ("tools/bench_host.py", "demo"), ("runtime", "model/demo")),
    Step("host8", "host_h200", 80, ("tools/bench_host.py", *k26(8), *DRAFTER), ("runtime",)),
    Step("load", "load_h200", 20, ("tools/bench_load.py", "--folder", "/tmp/k26"), (f"{KERNELS}/readers.py", f"{KERNELS}/residency.py")),
    Step("invariance", "invariance_h200", 45, ("tools/bench_invariance.py",), (KERNELS, "model/demo")),
    Step(
        "invariance8", "invariance_h200", 60,
        ("tools/bench_invariance.py", *k26(8), *DRAFTER, "--prompts", "0", "--max-model-len", "8192", "--num-pages", "1200"), (KERNELS,),
    ),
    Step("sanitizer", "sanitizer_h200", 300, ("tools/sanitize.py",), (KERNELS,)),
    Step("serve", "serve_h200", 40, ("tools/bench_serve_gpu.py",), ("server", "runtime", "model/demo")),
    Step(
        "sweetspot", "sweetspot_h200", 110,
        ("tools/bench_sweetspot.py", "demo", "--curve", "h200-demo", "--curves", "{out}"), ("runtime", "model/demo"),
    ),
    Step(
        "sweetspot6", "sweetspot_h200", 150,
        ("tools/bench_sweetspot.py", *k26(6), *DRAFTER, "--replay", "tests/fixtures/draft_traces.npz",
         "--curve", "h200-k26-6", "--curves", "{out}"),
        ("runtime", "tests/fixtures/draft_traces.npz"),
    ),
    Step("ranks", "gpu_tests", 120, ("tools/gpu_tests.py", "tests/test_ranks_gpu.py"), (KERNELS, "runtime/processes.py"), 2),
    Step(
        "stages", "gpu_tests", 50, ("tools/gpu_tests.py", "tests/test_stages_gpu.py"),
        (KERNELS, "runtime/pipeline.py", "runtime/stage_comm.py"), 2,
    ),
    Step("allreduce", "allreduce_h200x2", 20, ("tools/bench_allreduce.py",), (f"{KERNELS}/all_reduce.cu",), 2),
    Step(
        "draw_ranks", "draw_ranks_h200x2", 40, ("tools/bench_draw_ranks.py",),
        (f"{KERNELS}/sample_ranks.cu", f"{KERNELS}/gather_ranks.cu"), 2,
    ),
    Step("step2", "step_h200x2", 70, ("tools/bench_step_ranks.py", "--layers", "16"), (KERNELS, "model/kimi_k26.py"), 2),
)  # fmt: skip


def changed_since(commit: str, paths: Sequence[str]) -> bool:
    """Whether a file below `paths` differs from that commit's; True where git does not know it."""
    found = subprocess.run(["git", "diff", "--quiet", commit, "--", *paths], cwd=ROOT, capture_output=True, check=False)
    return found.returncode != 0


def last_commit(step: Step) -> str:
    """Commit of the youngest record that the step's command wrote; "" where there is none. A command that holds the words of several
    steps is of the one with the most."""
    path = RESULTS / f"{step.record}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    others = [other.words for other in STEPS if other.record == step.record and len(other.words) > len(step.words)]
    commands = [(frozenset(row.get("cmd", "").split()), row.get("commit", "")) for row in rows]
    mine = [commit for words, commit in commands if step.words <= words and not any(other <= words for other in others)]
    return mine[-1] if mine else ""


def state_of(step: Step) -> str:
    commit = last_commit(step)
    if not commit:
        return "never recorded"
    return f"changed since {commit}" if changed_since(commit, step.paths) else f"as recorded at {commit}"


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run(steps: Sequence[Step], out: Path, pack: Path | None, commit: str, until_s: float) -> int:
    """Steps that failed or did not fit. Records are appended below `out`, and packed after each step, so that a cut loses one."""
    out.mkdir(parents=True, exist_ok=True)
    missed = []
    for step in steps:
        left_s = until_s - time.monotonic()
        if left_s < step.seconds:
            print(f"measure: {step.name}: takes {step.seconds:.0f} s, {max(left_s, 0):.0f} are left; left out", flush=True)
            missed.append(step.name)
            continue
        argv = [part.replace("{out}", str(out)) for part in (*step.argv, "--json", f"{{out}}/{step.record}.jsonl", "--commit", commit)]
        began, held = time.monotonic(), _bytes_of(out / f"{step.record}.jsonl")
        try:
            status = str(subprocess.run([sys.executable, *argv], cwd=ROOT, timeout=left_s, check=False).returncode)
        except subprocess.TimeoutExpired:
            status = "cut"
        if status == "0" and _bytes_of(out / f"{step.record}.jsonl") == held:
            status = "0, and no record"
        print(f"measure: {step.name}: exit {status} after {time.monotonic() - began:.0f} s", flush=True)
        if status != "0":
            missed.append(step.name)
        if pack is not None:
            with tarfile.open(pack, "w") as archive:
                archive.add(out, arcname=".")
    if missed:
        print(f"measure: not recorded: {', '.join(missed)}")
    return len(missed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="take the steps that need so many (default 1)")
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated, in this order; of {', '.join(s.name for s in STEPS)}")
    parser.add_argument("--stale", action="store_true", help="only what was never recorded or has changed since")
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all of them (default 30)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records (default tools/results)")
    parser.add_argument("--pack", type=Path, metavar="TAR", help="put that folder into an archive after each step")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--list", action="store_true", help="print the steps and the state of their records")
    options = parser.parse_args(arguments)
    by_name = {step.name: step for step in STEPS}
    unknown = [name for name in (options.only or "").split(",") if name and name not in by_name]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(by_name)}")
    if options.only:
        steps = [by_name[name] for name in options.only.split(",") if name]
    else:
        steps = [step for step in STEPS if options.list or step.gpus == options.gpus]
    if options.stale:
        steps = [step for step in steps if not state_of(step).startswith("as recorded")]
    if options.list:
        for step in steps:
            print(f"{step.name:12} {step.gpus} GPU {step.seconds:4.0f} s  {step.record:18} {state_of(step)}")
        return 0
    seen, needed = gpu_count(), max((step.gpus for step in steps), default=0)
    if seen < needed:
        print(f"measure: error: CuPy sees {seen} GPU(s), {needed} are needed; nothing was begun", file=sys.stderr)
        return 2
    return min(run(steps, options.out, options.pack, options.commit, time.monotonic() + 60 * options.minutes), 1)


if __name__ == "__main__":
    sys.exit(main())
