"""Which small tests launch which kernels: the families of tools/sanitize.py, and a check that no kernel is without one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "runtime" / "kernels_cu"
KERNELS = "tests/runtime/kernels_cu/"
_ENTRY = re.compile(r'extern "C"\s+__global__\s+void\s+(?:BOUNDS\s+|__launch_bounds__\([^)]*\)\s+)?((?!__)\w+)\s*\(')


@dataclass(frozen=True, slots=True)
class Family:
    """file: of tests; chosen: pytest's -k, a few small shapes of each build; kernels: what they launch of runtime/kernels_cu."""

    file: str
    chosen: str
    kernels: tuple[str, ...] = ()


_SMALL = (
    "embed rms_norm add_rms_norm silu_mul copy_rows gather_rows kv_move mla_latent query_rope head_norm_rope kv_write top_logprobs "
    "block_attention_part block_attention_merge linear_skinny linear_skinny_f32 sample plan_read block_rows publish "
    "top_pack top_merge side_by_side"
)
_CHUNKS = "test_matches_the_definition and (splits or edge or dead)"
FAMILIES = {  # the longest first: cuBLASLt's modules are large, and a tool patches each whole
    "linear_lt": Family(f"{KERNELS}test_linear_lt_gpu.py", "test_is_the_definition and False-False and (strided or absorb)"),
    "moe_w4": Family(
        f"{KERNELS}test_moe_w4_gpu.py", "test_layer_matches or test_routing",
        ("moe_w4", "moe_combine", "moe_pack", "moe_sort", "moe_route_sort"),
    ),
    "tree_mla": Family(
        f"{KERNELS}test_tree_mla_gpu.py", "(test_ragged and 48) or (test_heads and (rows-5 or rows-16 or 1-5 or 8-16))",
        ("tree_mla_plan", "tree_mla"),
    ),
    "trials": Family(f"{KERNELS}test_tree_mla_gpu.py", "test_trials", ("tree_mla_plan", "tree_mla", "tree_mla_merge")),
    "chunks": Family(f"{KERNELS}test_chunk_attention_gpu.py", _CHUNKS, ("split_chunks", "chunk_expand", "chunk_attention")),
    "tree_paths": Family(f"{KERNELS}test_tree_paths_gpu.py", "test_random_trees and 0-64 or 1-24", ("path_plan", "path_copy", "tree_mla")),
    "ranks": Family(
        f"{KERNELS}test_peer_kernels_gpu.py", "",
        ("all_reduce_one", "all_reduce_one_norm", "all_reduce_two", "all_reduce_two_norm", "sample_ranks", "gather_ranks"),
    ),
    "linear_stream": Family(
        f"{KERNELS}test_linear_stream_gpu.py", "test_is_the_definition and not carried", ("linear_stream", "linear_stream_f32"),
    ),
    "linear_carried": Family(
        f"{KERNELS}test_linear_stream_gpu.py", "test_is_the_definition and carried", ("linear_carried", "linear_carried_f32"),
    ),
    "small ops": Family(f"{KERNELS}test_small_ops_gpu.py", "test_every_family", tuple(_SMALL.split())),
    "residency": Family(f"{KERNELS}test_residency_gpu.py", "", ("hash_bf16", "hash_f32", "hash_i32", "repack_w4")),
    "model": Family(f"{KERNELS}test_backend_gpu.py", "test_the_model and tiny and 64"),
}  # fmt: skip
BENCH_ALONE = ("naive_hidden", "naive_out", "read_all", "fill_w4", "fill_bf16")  # what tools/moe_rig.py fills and compares with


@dataclass(frozen=True, slots=True)
class Edit:
    """What a source has instead of `text` where it is built for some tools: said otherwise, in a way that these follow."""

    file: str
    text: str
    instead: str
    tools: tuple[str, ...]


# Barrier 3 is met by warps of several roles, each at an instruction of its own. Its count is exact and no warp is split, so all come;
# but bar.sync is barrier.sync.aligned, which synccheck takes for one instruction that all execute: it reported every warp that came to
# the other. racecheck reported sums that this barrier orders, and weights that barrier 4 orders after it. barrier.sync is the same
# instruction of the machine, bit for bit, so it hides nothing, but the cubin lists it as one that threads may reach apart.
# A sum of squares in all_reduce_one_norm is its own flag: -1 until it comes. racecheck knows no such word: there the cluster meets,
# and rehearses nothing: a rehearsal reads words, and drops them, that another block may be writing already.
EDITS = (
    Edit(
        "tree_mla.cu", "named_barrier(3, kHearers);",
        'asm volatile("barrier.sync 3, %0;" ::"n"(kHearers) : "memory");', ("racecheck", "synccheck"),
    ),
    Edit("tree_mla_rows.cu", "named_barrier(3, 256);", 'asm volatile("barrier.sync 3, 256;" ::: "memory");', ("racecheck", "synccheck")),
    Edit(
        "all_reduce.cu", "for (int group = lane; group < kGroups; group += 32)",
        "cluster_arrive();\n      cluster_wait();\n      for (int group = lane; group < kGroups; group += 32)", ("racecheck",),
    ),
    Edit("all_reduce.cu", "kRehearsed = kRehearses &&", "kRehearsed = false &&", ("racecheck",)),
)  # fmt: skip


def edited(name: str, text: str, tool: str) -> str:
    """A source as it is built for a tool. ValueError where what is to be edited is not in it."""
    for edit in EDITS:
        if edit.file == name and tool in edit.tools:
            if edit.text not in text:
                raise ValueError(f"{name}: an edit for {tool} finds no {edit.text!r}; tools/sanitize_families.py names it")
            text = text.replace(edit.text, edit.instead)
    return text


def build_for(tool: str) -> None:
    """Has this process build sources as a tool needs them, and take cuBLASLt's first suggestion: timing all of them is of no use."""
    from runtime.kernels_cu import _build, linear_lt

    read = _build.read_source
    _build.read_source = lambda name: edited(name, read(name), tool)
    linear_lt.SUGGESTIONS = 1


def kernel_entries(folder: Path = SOURCES) -> dict[str, str]:
    """Every kernel by its entry, and the file that holds it."""
    files = (*folder.glob("*.cu"), *folder.glob("prim/*.cuh"))
    found: dict[str, str] = {}
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        names = _ENTRY.findall(text)
        if len(names) != text.count("__global__"):
            raise ValueError(f"{file.name}: {text.count('__global__')} kernels, of which {len(names)} are read: {', '.join(names)}")
        found |= dict.fromkeys(names, file.name)
    return found


def note_launches() -> None:
    """Has this process add the name of each kernel that it launches to the file that the variable LAUNCHED names, if it does, and
    build for the tool that SANITIZED names."""
    if tool := os.environ.get("SANITIZED"):
        build_for(tool)
    where = os.environ.get("LAUNCHED")
    if not where:
        return
    from runtime.kernels_cu._launch import Launch

    run, seen = Launch.run, set[str]()

    def noted(launch: Any, stream: int) -> None:
        if launch.function.name not in seen:
            seen.add(launch.function.name)
            with open(where, "a", encoding="utf-8") as file:
                file.write(f"{launch.function.name}\n")
        run(launch, stream)

    Launch.run = noted  # type: ignore[method-assign]


def not_launched(family: str, notes: Path) -> list[str]:
    """Kernels of a family that its tests, which left these notes, did not launch."""
    seen = set(notes.read_text(encoding="utf-8").split()) if notes.exists() else set()
    return [name for name in FAMILIES[family].kernels if name not in seen]
