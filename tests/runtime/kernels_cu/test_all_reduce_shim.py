"""The sum over ranks on the CPU shim: two to four processes, one library each, regions in shared memory.

Every block or cluster of a rank runs to its end before the next, so this shows index arithmetic, epochs, places and turns; it shows
nothing of weak memory or of speed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.kernels_cu import all_reduce as kernel
from runtime.kernels_cu import dense
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_np import dense as define
from runtime.shared import SharedBlock
from tests.forks import on_ranks
from tests.mutants import mutant
from tests.shim_calls import Device, address, bf16, forget, poisoned, run_call

EPS = 1e-5
HIDDEN = 512  # 64 vectors
needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")


def config_for(world: int, threads: int = 32, vecs: int = 2, clusters: bool = True) -> kernel.Config:
    return kernel.Config(world, threads, vecs, blocks=8, rows=24, clusters=clusters, rehearsals=1)


class World:
    """The regions of a group, and a rank's view of them."""

    def __init__(self, config: kernel.Config, lib: ctypes.CDLL, spins: int = 2_000_000, hidden: int = HIDDEN) -> None:
        self.config, self.lib, self.spins = config, lib, spins
        size = config.region_bytes(hidden)
        assert (lib.cpu_region_bytes(), lib.cpu_state_bytes()) == (size, config.state_bytes())
        self.blocks = [SharedBlock.create(size) for _ in range(config.world)]
        self.regions = [block.array(0, size) for block in self.blocks]

    def rank(self, rank: int) -> tuple[kernel.Ranks, np.ndarray, np.ndarray]:
        state, told = np.zeros(self.config.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
        at = [int(region.ctypes.data) for region in self.regions]
        return kernel.Ranks(rank, at, state.ctypes.data, told.ctypes.data, self.spins), state, told


def parts_of(world: int, m: int, seed: int, hidden: int = HIDDEN) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((world, m, hidden)).astype(bf16)


def sum_of(parts: np.ndarray) -> np.ndarray:
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32)
    return total.astype(bf16)


Step = tuple[str, int, bool]  # one or two, rows, with a norm
MIXED: list[Step] = [
    ("one", 1, False), ("one", 3, True), ("two", 5, False), ("one", 8, True), ("two", 24, True), ("one", 1, True), ("one", 2, False),
    ("two", 1, True), ("two", 11, False), ("one", 4, False), ("one", 8, False), ("two", 9, True), ("one", 5, True), ("one", 1, False),
]  # fmt: skip


def run_steps(w: World, rank: int, steps: list[Step], dead: bool = False) -> list[str]:
    """Runs the calls on one rank; what was wrong."""
    return walk(w.config, w.lib, w.rank(rank), steps, dead)


def walk(
    config: kernel.Config, lib: ctypes.CDLL | Device, seat: tuple[kernel.Ranks, np.ndarray, np.ndarray], steps: list[Step], dead: bool
) -> list[str]:
    """The calls of one rank, on the shim or on a device. seat: as `World.rank` has it."""
    ranks, state, told = seat
    rank, wrong = ranks.rank, []
    for n, (kind, m, with_norm) in enumerate(steps):
        parts, rng = parts_of(config.world, m, n), np.random.default_rng(1000 + n)
        seq = np.zeros(m, np.int32)
        if dead and m > 1:
            seq[m // 2] = -1
            parts[:, m // 2] = np.nan
        x, weight = rng.standard_normal((m, HIDDEN)).astype(bf16), rng.standard_normal(HIDDEN).astype(bf16)
        own, before, want_x, want, out = parts[rank].copy(), x.copy(), x.copy(), np.zeros_like(x), poisoned(m, HIDDEN)
        address(state), address(told)  # which a device takes along with each call
        norm = kernel.Norm(address(x), address(weight), address(out), EPS) if with_norm else None
        shot = kernel.one_shot if kind == "one" else kernel.two_shot
        call = shot(config, m, HIDDEN, ranks, part=address(own), norm=norm, seq=address(seq) if dead else 0)
        run_call(lib, call, descending=n % 2 == 1)
        forget()
        total, live = sum_of(parts), seq >= 0
        if not with_norm and own[live].tobytes() != total[live].tobytes():
            wrong.append(f"call {n}, {kind} of {m} rows: not the sum")
        if with_norm:
            define.add_rms_norm(want_x, total, weight.astype(np.float32), EPS, out=want)
            error = np.abs(out[live].astype(np.float32) - want[live].astype(np.float32)).max()
            if x[live].tobytes() != want_x[live].tobytes() or not error <= 0.04:
                wrong.append(f"call {n}, {kind} of {m} rows with norm: off by {error}")
            if not np.isnan(out[~live].astype(np.float32)).all() or x[~live].tobytes() != before[~live].tobytes():
                wrong.append(f"call {n}: a dead row was written")
    if told[0] or state[-1]:
        wrong.append(f"rank {told[0] - 1} did not come")
    return wrong


@pytest.mark.parametrize(("world", "threads", "vecs"), [(2, 64, 1), (2, 32, 2), (3, 32, 2), (4, 32, 2), (2, 96, 1)])
@pytest.mark.parametrize("dead", [False, True])
def test_sums_are_those_of_the_definition_over_calls_of_every_kind(
    shim: Callable[..., ctypes.CDLL], world: int, threads: int, vecs: int, dead: bool
) -> None:
    config = config_for(world, threads, vecs)
    w = World(config, shim("all_reduce_entry.cu", config.defines(HIDDEN)))
    assert on_ranks(world, lambda rank: run_steps(w, rank, MIXED * 3, dead)) == [[]] * world


@pytest.mark.parametrize(("world", "vecs"), [(2, 2), (2, 1), (3, 2)])
def test_blocks_with_many_rows_take_them_in_batches(shim: Callable[..., ctypes.CDLL], world: int, vecs: int) -> None:
    config = kernel.Config(world, 64 // vecs, vecs, blocks=2, rows=24)
    w = World(config, shim("all_reduce_entry.cu", config.defines(HIDDEN)))
    steps: list[Step] = [("two", 24, False), ("two", 24, True), ("two", 7, True), ("one", 2, True), ("two", 23, False), ("two", 18, True)]
    for dead in (False, True):
        w = World(config, w.lib)
        assert on_ranks(world, lambda rank, w=w, dead=dead: run_steps(w, rank, steps, dead)) == [[]] * world  # type: ignore[misc]


@pytest.mark.parametrize(
    ("threads", "vecs", "clusters", "parts", "rehearsals"),
    [(128, 1, True, 0, 1), (64, 2, True, 0, 0), (64, 2, False, 0, 2), (128, 1, True, 4, 2), (128, 1, True, 1, 0)],
)
def test_a_sum_and_its_norm_in_one_kernel_have_the_bits_of_two(
    shim: Callable[..., ctypes.CDLL], threads: int, vecs: int, clusters: bool, parts: int, rehearsals: int
) -> None:
    """Whether four blocks, two or one have a row, by one shot or two, rehearsed or not: dense.cu's with a vector a thread."""
    hidden = 1024
    config = kernel.Config(2, threads, vecs, 16, 24, clusters, parts, rehearsals)
    w = World(config, shim("all_reduce_entry.cu", config.defines(hidden)), hidden=hidden)
    apart = shim("dense_entry.cu", dense.Config(hidden // 8, 1).defines())
    shots = [(kernel.one_shot, m) for m in (4, 8, 11) if m * parts <= 16] + [(kernel.two_shot, 18)]
    calls = [shot(config, m, hidden, w.rank(0)[0], part=0, norm=kernel.Norm(0, 0, 0, EPS)) for shot, m in shots]
    by_table = [4, 2, 1, 1] if clusters and not parts else [parts or 1] * len(calls)
    assert [call.cluster for call in calls] == [*by_table[:-1], 1]

    def differing(rank: int) -> list[str]:
        ranks, _, _ = w.rank(rank)
        found = []
        for n, (shot, m) in enumerate(shots):
            parts, rng = parts_of(2, m, n, hidden), np.random.default_rng(50 + n)
            x, weight = rng.standard_normal((m, hidden)).astype(bf16), rng.standard_normal(hidden).astype(bf16)
            own, total, want_x, out, want = parts[rank].copy(), sum_of(parts), x.copy(), poisoned(m, hidden), poisoned(m, hidden)
            norm = kernel.Norm(x.ctypes.data, weight.ctypes.data, out.ctypes.data, EPS)
            run_call(w.lib, shot(config, m, hidden, ranks, part=own.ctypes.data, norm=norm))
            at = {"x": want_x.ctypes.data, "delta": total.ctypes.data, "w": weight.ctypes.data, "out": want.ctypes.data}
            run_call(apart, dense.add_rms_norm(dense.Config(hidden // 8, 1), m, hidden, EPS, **at))
            found += [f"call {n}: {name}" for name, a, b in (("x", x, want_x), ("out", out, want)) if a.tobytes() != b.tobytes()]
        return found

    assert on_ranks(2, differing) == [[], []]


def test_more_than_four_ranks_poll_in_halves(shim: Callable[..., ctypes.CDLL]) -> None:
    config = config_for(5)
    w = World(config, shim("all_reduce_entry.cu", config.defines(HIDDEN)))
    assert on_ranks(5, lambda rank: run_steps(w, rank, MIXED)) == [[]] * 5


def test_a_rank_that_does_not_come_is_named_and_waited_for_once(shim: Callable[..., ctypes.CDLL]) -> None:
    """Tried again where a busy machine held a rank back that did come: then that one may be named."""
    config = config_for(3)
    lib = shim("all_reduce_entry.cu", config.defines(HIDDEN))

    def named(kind: str) -> list[int]:
        w, start = World(config, lib, spins=20_000), time.time() + 0.5

        def alone(rank: int) -> int:
            if rank == 1:
                return 2
            time.sleep(max(0.0, start - time.time()))
            ranks, state, told = w.rank(rank)
            part = parts_of(3, 4, 0)[rank].copy()
            shot = kernel.one_shot if kind == "one" else kernel.two_shot
            for _ in range(3):
                run_call(lib, shot(config, 4, HIDDEN, ranks, part=part.ctypes.data))
            assert state[-1] == told[0] > 0
            return int(told[0])

        return on_ranks(3, alone)

    for kind in ("one", "two"):
        assert any(named(kind) == [2, 2, 2] for _ in range(5)), kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("packets[epoch & 1][g.rank][unit]", "packets[0][g.rank][unit]"),  # no turns on the sender's side
        ("if (threadIdx.x == 0) g.state->two[block] = epoch;", ""),  # flags of the last call pass for this one's
        ("g.of[peer]->sums[m + t * owned_step][i] = packed;", "if (peer) g.of[peer]->sums[m + t * owned_step][i] = packed;"),
        ("const uint4 v = s == g.rank ? mine[n] : ", "const uint4 v = s == 0 ? mine[n] : "),
        ("(threadIdx.x == 0) g.state->one[unit] = epoch;", "(threadIdx.x == 0) g.state->one[unit] = 1;"),
        ("read_w(have, r, piece * count, count);", "read_w(have, r, 0, count);"),
        ("store_if(real, r.x + at + i, have.x[k]);", "store_if(true, r.x + at + i, have.x[k]);"),  # a rehearsal writes
    ],
)
def test_planted_faults_are_found(tmp_path: Any, old: str, new: str) -> None:
    config = config_for(2)
    w = World(config, mutant(tmp_path, "all_reduce.cu", old, new)("all_reduce_entry.cu", config.defines(HIDDEN)), spins=300)
    assert any(on_ranks(2, lambda rank: run_steps(w, rank, MIXED)))


def test_configurations_are_checked() -> None:
    config = config_for(2)
    ranks = kernel.Ranks(0, [0, 0], 0, 0)
    for bad, text in (
        (kernel.Config(9), "9 ranks"),
        (kernel.Config(2, threads=100), "whole warps"),
        (kernel.Config(2, threads=32, vecs=1), "room for 32 vectors, a row of H = 512 has 64"),
        (kernel.Config(2, blocks=7), "an even number of blocks"),
        (kernel.Config(2, parts=4), "4 blocks share 64 vectors"),
    ):
        with pytest.raises(ValueError, match=text):
            bad.check(HIDDEN)
    with pytest.raises(ValueError, match="one_shot of 9 rows; 1 to 8 fit"):
        kernel.one_shot(config, 9, HIDDEN, ranks, part=0)
    with pytest.raises(ValueError, match="5 rows of 2 blocks; 8 fit"):
        kernel.one_shot(kernel.Config(2, 32, 2, 8, parts=2), 5, HIDDEN, ranks, part=0)
    with pytest.raises(ValueError, match="two_shot of 25 rows; 1 to 24 fit"):
        kernel.two_shot(config, 25, HIDDEN, ranks, part=0)
    with pytest.raises(ValueError, match="rank 0 with 3 regions, built for 2"):
        kernel.one_shot(config, 1, HIDDEN, kernel.Ranks(0, [0, 0, 0], 0, 0), part=0)
    assert kernel.candidates(8, 7168, 132)[0] == kernel.Config(8, 224, 4, 128) and kernel.candidates(2, 7168, 132)[0].threads == 896
    archs = {arch: kernel.candidates(2, 7168, 132, arch)[0].clusters for arch in ARCHITECTURES}
    assert archs == {"sm_80": False, "sm_89": False, "sm_90a": True, "sm_100a": True, "sm_120a": True}


@needs_nvrtc
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_candidate_builds_for_every_architecture_without_spills(world: int) -> None:
    for config in kernel.candidates(world, 7168, 132):
        for arch in ARCHITECTURES:
            assert set(build(kernel.SOURCE, config.defines(7168), arch).entries) == set(kernel.ENTRIES)
