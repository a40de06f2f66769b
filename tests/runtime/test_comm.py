"""Collectives of processes that share a block of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime import shared_comm
from runtime.comm import SoloComm
from runtime.shared import LINE, PeerLost, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from tests.forks import on_ranks


def with_comms(world: int, call: Callable[[SharedComm, Watch], Any], deadline_s: float = 30.0) -> list[Any]:
    block = SharedBlock.create(LINE + SharedComm.nbytes(world))

    def run(rank: int) -> Any:
        watch = Watch(block, 0, deadline_s)
        return call(SharedComm(rank, world, block, LINE, watch), watch)

    return on_ranks(world, run)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_all_ranks_hold_the_same_bits(world: int, dtype: Any) -> None:
    parts = np.random.default_rng(0).standard_normal((world, 5, 7)).astype(dtype)

    def reduce(comm: SharedComm, _: Watch) -> bytes:
        x = np.empty((5, 7), dtype)
        for _ in range(200):  # reuse of the places must not mix rounds
            x[:] = parts[comm.rank]
            comm.all_reduce(x)
        return x.tobytes()

    results = with_comms(world, reduce)
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part
    assert results == [total.astype(dtype).tobytes()] * world, "summed in rank order in float32, rounded once"


def test_a_gather_is_in_rank_order_and_a_long_part_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_comm, "PIECE_BYTES", 64)

    def both(comm: SharedComm, _: Watch) -> tuple[list[list[float]], list[float]]:
        out = np.empty((11, 9), np.float32)
        comm.all_gather(np.arange(33, dtype=np.float32).reshape(11, 3) + 100 * comm.rank, out=out)
        x = np.arange(50, dtype=np.float32) * 10**comm.rank
        comm.all_reduce(x)
        return out.tolist(), x.tolist()

    own = np.arange(33, dtype=np.float32).reshape(11, 3)
    want = (np.concatenate([own, own + 100, own + 200], axis=1).tolist(), (np.arange(50) * 111.0).tolist())
    assert with_comms(3, both) == [want] * 3
    with pytest.raises(AssertionError, match="a row of 17 numbers exceeds 64 bytes"):
        with_comms(2, lambda comm, _: comm.all_gather(np.zeros((1, 17), np.float32), out=np.zeros((1, 34), np.float32)))


def test_a_strided_sum_is_refused() -> None:
    with pytest.raises(AssertionError, match="not contiguous"):
        with_comms(2, lambda comm, _: comm.all_reduce(np.zeros((4, 4), np.float32)[:, :2]))


@pytest.mark.parametrize(("declared", "text"), [(True, "rank 1 is gone"), (False, "rank 1 has not come to exchange 1 for")])
def test_a_dead_or_silent_rank_frees_the_others(declared: bool, text: str) -> None:
    def half(comm: SharedComm, watch: Watch) -> tuple[str, float]:
        if comm.rank == 1:
            if declared:
                watch.declare(1)
                watch.declare(0)  # the first to be named stays
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(PeerLost) as lost:
            comm.all_reduce(np.zeros((1, 1), np.float32))
        return str(lost.value), time.monotonic() - begun

    message, seconds = with_comms(2, half, deadline_s=0.3)[0]
    assert text in message
    assert seconds < 5 and (declared or seconds >= 0.3)


def test_solo_is_the_identity() -> None:
    x = np.ones((2, 3), np.float32)
    out = np.empty_like(x)
    SoloComm().all_reduce(x)
    SoloComm().all_gather(x, out=out)
    assert np.array_equal(out, x)
