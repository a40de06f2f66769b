"""The kernels that ranks meet in, by two processes on one GPU that open each other's memory: the checks of the shim's tests.

So they are tested and sanitized where there is one device. tests/test_ranks_gpu.py has the way over two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from runtime.kernels_cu import all_reduce, sample_ranks
from runtime.kernels_cu.all_reduce import Ranks
from runtime.kernels_cu.device import arch_of_device
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from tests.forks import on_ranks
from tests.runtime.kernels_cu import test_all_reduce_shim as of_sums
from tests.runtime.kernels_cu import test_sample_ranks_shim as of_draws
from tests.runtime.kernels_cu.gpu_calls import Get, gpu_calls, stand_in_calls
from tests.shim_calls import address, forget
from tools.sanitize_families import note_launches

WORLD, DEADLINE_S = 2, 240.0
SUMS = of_sums.config_for(WORLD)
DRAWS = sample_ranks.Config(WORLD, 64, 4)
REGION_BYTES = {"sums": SUMS.region_bytes(of_sums.HIDDEN), "draws": DRAWS.region_bytes(), "rows": DRAWS.region_bytes()}


def sums(get: Get, rank: int, regions: Sequence[int], meet: Callable[[], Any], spins: int, arch: str = "sm_90a") -> list[str]:
    """What was wrong with any of the sums of one rank."""
    state, told = np.zeros(SUMS.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
    seat = Ranks(rank, regions, state.ctypes.data, told.ctypes.data, spins), state, told
    config = replace(SUMS, clusters=all_reduce.has_clusters(arch))
    library = get("all_reduce_entry.cu", config.defines(of_sums.HIDDEN))
    meet()
    return [wrong for dead in (False, True) for wrong in of_sums.walk(config, library, seat, of_sums.MIXED, dead)]


def draws(get: Get, rank: int, regions: Sequence[int], meet: Callable[[], Any], spins: int) -> list[of_draws.Found]:
    """One rank's outputs of every step."""
    state, told = np.zeros(DRAWS.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
    library, found = get("sample_ranks_entry.cu", DRAWS.defines()), []
    meet()
    for step in of_draws.steps_for(WORLD):
        forget()
        found.append(of_draws.launch(library, DRAWS, step, Ranks(rank, regions, address(state), address(told), spins), spare=2))
    assert not told[0] and not state[-1], f"rank {told[0] - 1} did not come"
    return found


def rows(get: Get, rank: int, regions: Sequence[int], meet: Callable[[], Any], spins: int) -> list[np.ndarray]:
    """What one rank gathered."""
    state, told = np.zeros(DRAWS.state_bytes() // 4, np.uint32), np.zeros(1, np.uint32)
    library = get("gather_ranks_entry.cu", DRAWS.defines())
    meet()
    seat = sample_ranks.Seat(DRAWS, Ranks(rank, regions, address(state), address(told), spins))
    return of_draws.gather(library, seat, of_draws.SHAPES)


WAYS: dict[str, Callable[..., Any]] = {"sums": sums, "draws": draws, "rows": rows}


def check(way: str, by_rank: list[Any]) -> None:
    if way == "sums":
        assert by_rank == [[]] * WORLD
    elif way == "rows":
        of_draws.check_gathered(by_rank, WORLD)
    else:
        for n, step in enumerate(of_draws.steps_for(WORLD)):
            of_draws.check(step, [found[n] for found in by_rank])


def on_device(way: str, path: str, rank: int) -> Any:
    """One rank's part in a process of its own; both have the first device."""
    import cupy

    note_launches()
    cupy.cuda.set_allocator(None)
    block, runtime = SharedBlock.open(path), cupy.cuda.runtime
    host = SharedComm(rank, WORLD, block, LINE, Watch(block, 0, DEADLINE_S))
    own = int(runtime.malloc(REGION_BYTES[way]))
    runtime.memset(own, 0, REGION_BYTES[way])
    runtime.deviceSynchronize()
    regions, why = [], ""
    try:
        handle = bytes(runtime.ipcGetMemHandle(own))
    except runtime.CUDARuntimeError as error:
        handle, why = bytes(64), f"no handle: {error}"
    for peer, other in enumerate(host.gather_bytes(handle)):
        try:
            regions.append(own if peer == rank else int(runtime.ipcOpenMemHandle(other)))
        except runtime.CUDARuntimeError as error:
            why = why or f"a handle is not opened: {error}"
    if host.gather_bytes(bytes([not why])) != [b"\1"] * WORLD:
        return f"CUDA IPC does not work here: {why or 'the other process says so'}"
    more = {"arch": arch_of_device()} if way == "sums" else {}
    found = WAYS[way](gpu_calls(), rank, regions, lambda: host.gather_bytes(b"\0"), all_reduce.SPINS, **more)
    host.gather_bytes(b"\0")  # nobody's memory goes while another may write into it
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_meet_on_one_gpu(way):
    block = SharedBlock.create(LINE + SharedComm.nbytes(WORLD))
    found = on_ranks(WORLD, partial(on_device, way, block.path), DEADLINE_S, start="spawn")
    if isinstance(found[0], str):
        pytest.skip(found[0])
    check(way, found)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_meet_over_a_stand_in(shim, way):
    blocks = [SharedBlock.create(REGION_BYTES[way]) for _ in range(WORLD)]
    regions = [int(block.array(0, 1).ctypes.data) for block in blocks]
    sources = {"sums": ("all_reduce_entry.cu", SUMS.defines(of_sums.HIDDEN)), "draws": ("sample_ranks_entry.cu", DRAWS.defines())}
    shim(*sources.get(way, ("gather_ranks_entry.cu", DRAWS.defines())))  # built before there are two
    check(way, on_ranks(WORLD, lambda rank: WAYS[way](stand_in_calls(shim), rank, regions, lambda: None, 2_000_000)))


def test_mutation_a_rank_in_the_wrong_place_shows(shim):
    shim("gather_ranks_entry.cu", DRAWS.defines())
    blocks = [SharedBlock.create(REGION_BYTES["rows"]) for _ in range(WORLD)]
    regions = [int(block.array(0, 1).ctypes.data) for block in blocks]
    found = on_ranks(WORLD, lambda rank: rows(stand_in_calls(shim), rank, regions, lambda: None, 2_000_000))
    with pytest.raises(AssertionError):
        check("rows", [found[0], [np.roll(one, 4, axis=1) for one in found[1]]])
