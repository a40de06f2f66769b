"""Sampling over ranks on the CPU shim: two to four processes draw what one rank draws from all logits, bit for bit.

Blocks run one after another, as in test_all_reduce_shim.py: this shows arithmetic, exchanges and their order, nothing of weak memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from runtime.hw import HARDWARE
from runtime.kernels_cu import gather_ranks
from runtime.kernels_cu import sample_ranks as kernel
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.all_reduce import Ranks
from runtime.kernels_np.sample import sample as define
from runtime.shared import SharedBlock
from tests.draws import Draws, adjusted, mixed
from tests.forks import on_ranks
from tests.mutants import mutant
from tests.shim_calls import Device, address, run_call

Get = Callable[[str, dict[str, int]], ctypes.CDLL]
Library = ctypes.CDLL | Device
Found = dict[str, np.ndarray]
needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")


class Group:
    """The regions of a group; `run` makes the same launches on all ranks, one after another over the same state."""

    def __init__(self, get: Get, config: kernel.Config, spins: int = 2_000_000) -> None:
        self.config, self.spins, self.lib = config, spins, get("sample_ranks_entry.cu", config.defines())
        assert (self.lib.cpu_region_bytes(), self.lib.cpu_state_bytes()) == (config.region_bytes(), config.state_bytes())
        self.blocks = [SharedBlock.create(config.region_bytes()) for _ in range(config.world)]

    def run(self, steps: Sequence[Draws], spare: int = 2, dead: Sequence[int] = ()) -> list[list[Found]]:
        """By rank, then by step."""
        at = [int(block.array(0, 1).ctypes.data) for block in self.blocks]

        def on_rank(rank: int) -> list[Found]:
            state, told = np.zeros(self.config.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
            ranks = Ranks(rank, at, address(state), address(told), self.spins)
            found = [launch(self.lib, self.config, step, ranks, spare, dead) for step in steps]
            assert not told[0] and not state[-1], f"rank {told[0] - 1} did not come"
            return found

        return on_ranks(self.config.world, on_rank)


def launch(lib: Library, config: kernel.Config, step: Draws, ranks: Ranks, spare: int = 0, dead: Sequence[int] = ()) -> Found:
    """One rank's launch, on the shim or on a device."""
    (rows, vocab), share = step.logits.shape, step.logits.shape[1] // config.world
    own = np.full((rows + spare, share), np.nan, np.float32)
    own[:rows] = step.logits[:, ranks.rank * share : (ranks.rank + 1) * share]
    own[list(dead)] = np.nan
    seq = step.seq.copy()
    seq[list(dead)] = -1
    found = {name: np.concatenate([a, np.full((spare, *a.shape[1:]), a.flat[0] if a.size else 0)]) for name, a in step.outputs().items()}
    lengths = {"live_seq": "adjust_seq", "live_row": "adjust_row", "live_masks": "mask_rows"}
    live = {"live": rows} | {name: len(step.plan[table]) for name, table in lengths.items()}
    counts = {name: np.array([n], np.int32) for name, n in live.items()}
    beyond = np.concatenate([step.out_rows, np.full(spare, 1 << 30, np.int32)])
    arrays = {**step.plan, **found, **counts, "out_rows": beyond, "seq": seq, "logits": own}
    run_call(lib, kernel.call(rows + spare, share, step.top, config, {n: address(a) for n, a in arrays.items()}, ranks, -(-vocab // 32)))
    return {name: a[:rows] for name, a in found.items()}


def check(step: Draws, ranks: Sequence[Found]) -> None:
    step.compare(ranks[0], step.defined(define), atol=1e-5)
    for found in ranks[1:]:
        assert all(found[name].tobytes() == ranks[0][name].tobytes() for name in found), "all ranks hold the same bits"


def check_all(get: Get, config: kernel.Config, steps: Sequence[Draws], spins: int = 2_000_000) -> None:
    by_rank = Group(get, config, spins).run(steps)
    for n, step in enumerate(steps):
        check(step, [found[n] for found in by_rank])


def steps_for(world: int) -> list[Draws]:
    """Every filter, ties on a grid and over whole rows, tables, masks, one token's share, few and many rows of a block."""
    rng = np.random.default_rng(world)
    flat = Draws(
        np.zeros((8, 640 * world)), temperature=[0.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0], top_p=[1, 1, 0.5, 1e-6, 1, 1, 1, 1],
        top_k=[0, 0, 0, 0, 33, 641, 642, 643], top=9, logprobs=1,
    )  # fmt: skip
    banned = Draws(rng.standard_normal((3, 64)), mask_rows=[0, 2], masks=np.zeros((2, 2)), temperature=[1.0, 1.0, 0.0], top_p=0.9)
    narrow = Draws(rng.standard_normal((4, 4 * world)), top=4 * world, logprobs=4, top_p=0.7)
    return [
        mixed(rng, 9, 100 * world), mixed(rng, 10, 1600 * world, grid=True), flat, mixed(rng, 1, 8 * world),
        adjusted(rng, 6, 100 * world), banned, narrow, mixed(rng, 10, 400 * world, top=0),
    ]  # fmt: skip


@pytest.mark.parametrize(("world", "threads", "blocks"), [(2, 64, 3), (4, 32, 8)])
def test_tokens_are_those_of_one_rank(shim: Get, world: int, threads: int, blocks: int) -> None:
    check_all(shim, kernel.Config(world, threads, blocks), steps_for(world))


def test_a_whole_vocabulary(shim: Get) -> None:
    rng = np.random.default_rng(0)
    step = Draws(
        4 * rng.standard_normal((3, 163_840)), top=20, logprobs=20, top_p=[0.95, 1, 0.999], top_k=[0, 50, 0], temperature=[0.6, 1, 3]
    )
    check_all(shim, kernel.Config(2, 512, 2), [step])


def test_broken_and_dead_rows_leave_their_neighbours_alone(shim: Get) -> None:
    step = mixed(np.random.default_rng(2), 12, 240)
    step.logprobs[:] = 2
    clean = Group(shim, kernel.Config(2, 64, 3)).run([step])
    step.logits[3, 200], step.logits[7, 5], step.logits[8, 6] = np.nan, np.inf, -np.inf
    broken = Group(shim, kernel.Config(2, 64, 3)).run([step], dead=[1, 10])
    others = np.setdiff1d(np.arange(12), [1, 3, 7, 8, 10])
    for (one,), (two,) in zip(broken, clean, strict=True):
        assert np.flatnonzero(one["finite"] == 0).tolist() == [1, 3, 7, 8, 10]
        assert not one["target"][[3, 7, 8]].any() and np.isnan(one["logp"][[3, 7, 8]]).all() and np.isnan(one["top_logp"][[3, 7, 8]]).all()
        assert all(np.array_equal(one[name][others], two[name][others]) for name in one)
        assert all(np.array_equal(one[name][[1, 10]], step.outputs()[name][[1, 10]]) for name in one)


def test_a_rank_that_does_not_come_is_named(shim: Get) -> None:
    group, step = Group(shim, kernel.Config(2, 32, 2), spins=20_000), mixed(np.random.default_rng(2), 3, 80)

    def alone(rank: int) -> int:
        if rank == 1:
            return 2
        state, told = np.zeros(group.config.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
        at = [int(block.array(0, 1).ctypes.data) for block in group.blocks]
        for _ in range(3):
            launch(group.lib, group.config, step, Ranks(rank, at, state.ctypes.data, told.ctypes.data, group.spins))
        assert state[-1] == told[0]
        return int(told[0])

    assert on_ranks(2, alone) == [2, 2]


FAULTS = {
    "bins of one rank": ("prim/team.cuh", "hear((seat.rank + 1 + j / kStretch) % kWorld, j % kStretch));", "0);"),
    "lists that overlap": ("prim/team.cuh", "uint32_t at = listed;", "uint32_t at = 0;"),
    "the mass of one rank": ("prim/draw.cuh", "team.sum(block_sum<THREADS>(room.warp, kept))", "block_sum<THREADS>(room.warp, kept)"),
    "the share's own size": ("sample_ranks.cu", "s, WORLD * p.V, ranks)", "s, p.V, ranks)"),
    "the share's own largest": ("sample_ranks.cu", "float largest = rank_value(best), temp", "float largest = largest_raw, temp"),
    "a mask from its beginning": ("prim/draw.cuh", "marked(mask, first + id)", "marked(mask, id)"),
    "sums without their shift": ("sample_ranks.cu", "* expf(upper(sh.first[s * n + 2]) - largest)", ""),
    "one rank's alternatives": ("sample_ranks.cu", "c / p.K * n + kHeader", "0 * n + kHeader"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(tmp_path: Any, fault: str) -> None:
    file, old, new = FAULTS[fault]
    with pytest.raises(AssertionError):
        check_all(mutant(tmp_path, file, old, new), kernel.Config(2, 64, 3), steps_for(2), spins=20_000)


def gathered(get: Get, seat_config: kernel.Config, shapes: Sequence[tuple[int, int]]) -> list[list[np.ndarray]]:
    """Rows of all ranks side by side, by rank, one launch after another over the same places."""
    lib = get("gather_ranks_entry.cu", seat_config.defines())
    blocks = [SharedBlock.create(seat_config.region_bytes()) for _ in range(seat_config.world)]
    at = [int(block.array(0, 1).ctypes.data) for block in blocks]

    def on_rank(rank: int) -> list[np.ndarray]:
        state, told = np.zeros(seat_config.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
        return gather(lib, kernel.Seat(seat_config, Ranks(rank, at, address(state), address(told), 2_000_000)), shapes)

    return on_ranks(seat_config.world, on_rank)


def gather(lib: Library, seat: kernel.Seat, shapes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """One rank's launches, on the shim or on a device."""
    found = []
    for rows, width in shapes:
        x, out = part_of(seat.ranks.rank, rows, width), np.zeros((rows, seat.config.world * width), np.uint16)
        run_call(lib, gather_ranks.call(seat, rows, 2 * width, x=address(x), out=address(out)))
        found.append(out)
    return found


def part_of(rank: int, rows: int, width: int) -> np.ndarray:
    return np.random.default_rng([rank, rows]).integers(0, 1 << 16, (rows, width), np.uint16)


SHAPES = [(3, 264), (1, 4), (4, 2048), (2, 264), (2, 8)]  # rows, width


def check_gathered(by_rank: Sequence[list[np.ndarray]], world: int) -> None:
    for found in by_rank:
        for got, (rows, width) in zip(found, SHAPES, strict=True):
            assert np.array_equal(got, np.concatenate([part_of(rank, rows, width) for rank in range(world)], axis=1))


@pytest.mark.parametrize("world", [2, 4])
def test_rows_are_gathered_side_by_side(shim: Get, world: int) -> None:
    check_gathered(gathered(shim, kernel.Config(world, 64, 4), SHAPES), world)


def test_a_fault_in_the_gather_shows(tmp_path: Any) -> None:
    get = mutant(tmp_path, "gather_ranks.cu", "x + (size_t)m * words", "x")
    found = gathered(get, kernel.Config(2, 64, 4), [(2, 8)])
    assert not np.array_equal(found[0][0][1], np.concatenate([part_of(rank, 2, 8)[1] for rank in range(2)]))


def test_what_does_not_fit_is_not_gathered() -> None:
    seat = kernel.Seat(kernel.Config(2, 64, 4), Ranks(0, [0, 0], 0, 0))
    assert [gather_ranks.fits(seat, *shape) for shape in ((4, 4096), (5, 8), (1, 12), (1, 4104))] == [True, False, False, False]
    with pytest.raises(ValueError, match="5 rows of 8 bytes; 1 to 4 rows"):
        gather_ranks.call(seat, 5, 8, x=0, out=0)


def test_both_sides_agree_on_sizes(shim: Get) -> None:
    for world in (2, 4):
        config = kernel.Config(world, 64, 3)
        assert shim("sample_ranks_entry.cu", config.defines()).cpu_shared_bytes() == config.smem_bytes(0)


def test_what_it_cannot_take_is_refused() -> None:
    config = kernel.Config(2)
    assert config.fits(20_480, 20) and not config.fits(20_482, 20) and not config.fits(20_480, 29) and not config.fits(1 << 21, 0)
    for bad, said in ((kernel.Config(9), "2 to 8 ranks"), (kernel.Config(2, 96), "96 threads"), (kernel.Config(2, 1024), "1024 threads")):
        with pytest.raises(ValueError, match=said):
            bad.check(64, 0)
    assert [kernel.exchanges(hot=hot, top_k=k, top_p=p) for hot, k, p in ((0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 1))] == [1, 2, 5, 7]
    alone, eighth = (kernel.predict_us(kernel.sample.Dims(64, 163_840 // n, 0), 2, n > 1 and 2, HARDWARE["h200"]) for n in (1, 8))
    assert eighth < alone / 2
    with pytest.raises(ValueError, match="shares of 6 tokens with 2 alternatives"):
        config.check(6, 2)
    with pytest.raises(ValueError, match="rank 2 with 2 regions, built for 2"):
        kernel.call(1, 64, 0, config, dict.fromkeys(kernel.sample.POINTERS, 0), Ranks(2, [0, 0], 0, 0), 2)


@needs_nvrtc
def test_compiles_without_stack_or_spills(test_level: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    builds = [(2, arch) for arch in ARCHITECTURES] + [(8, arch) for arch in ARCHITECTURES] if test_level > 1 else [(8, "sm_100a")]
    for world, arch in builds:  # more ranks, more registers; sm_100a takes the most
        entries = build(kernel.SOURCE, kernel.Config(world).defines(), arch).entries
        assert set(entries) == {"sample_ranks"} and entries["sample_ranks"].registers <= 128
        assert set(build(gather_ranks.SOURCE, kernel.Config(world).defines(), arch).entries) == {"gather_ranks"}
