"""Collectives of rank threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from runtime.comm import SoloComm, make_thread_comms


def on_ranks(world: int, call):  # type: ignore[no-untyped-def]
    comms = make_thread_comms(world)
    with ThreadPoolExecutor(world) as pool:
        return [f.result() for f in [pool.submit(call, comm) for comm in comms]]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_hold_the_same_bits(world: int) -> None:
    parts = np.random.default_rng(0).standard_normal((world, 5, 7)).astype(np.float32)

    def reduce(comm):  # type: ignore[no-untyped-def]
        x = parts[comm.rank].copy()
        for _ in range(20):  # reuse of the exchange must not mix rounds
            x[:] = parts[comm.rank]
            comm.all_reduce(x)
        return x

    results = on_ranks(world, reduce)
    assert all(np.array_equal(r, results[0]) for r in results)
    assert np.allclose(results[0], parts.sum(0), atol=1e-5)


def test_gather_is_in_rank_order() -> None:
    def gather(comm):  # type: ignore[no-untyped-def]
        out = np.empty((2, 6), np.float32)
        comm.all_gather(np.full((2, 2), comm.rank, np.float32), out=out)
        return out

    for out in on_ranks(3, gather):
        assert out[0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_dead_rank_frees_the_others() -> None:
    def half(comm):  # type: ignore[no-untyped-def]
        if comm.rank == 1:
            comm.abort()
            return "dead"
        with pytest.raises(threading.BrokenBarrierError):
            comm.all_reduce(np.zeros((1, 1), np.float32))
        return "freed"

    assert on_ranks(2, half) == ["freed", "dead"]


def test_solo_is_the_identity() -> None:
    x = np.ones((2, 3), np.float32)
    out = np.empty_like(x)
    SoloComm().all_reduce(x)
    SoloComm().all_gather(x, out=out)
    assert np.array_equal(out, x)
