"""Which way a sum takes, and what a group refuses; that the ways give sums is shown by the shim's tests."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.kernels_cu.all_reduce import Config, Ranks
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.peer_comm import LARGE, ONE, TWO, PeerComm, PeerMemory, Thresholds, default_thresholds
from runtime.kernels_cu.peers_cuda import choose
from tests.shim_device import ShimDevice


def times(**rows: tuple[float, float, float]) -> dict[int, dict[str, float]]:
    return {int(name[1:]): dict(zip((ONE, TWO, LARGE), us, strict=True)) for name, us in rows.items()}


def test_thresholds_are_where_the_fastest_way_changes_first() -> None:
    h200 = times(m1=(3.0, 5.5, 7.6), m32=(5.7, 6.0, 10.0), m64=(9.0, 8.5, 13.0), m256=(24.0, 18.0, 33.0), m1024=(90.0, 52.0, 68.0))
    assert choose(h200) == Thresholds(32, 1024)
    assert choose(times(m1=(3.0, 5.5, 7.6), m2=(9.0, 8.0, 7.6), m4=(1.0, 2.0, 3.0))) == Thresholds(1, 1)
    assert choose(times(m1=(9.0, 8.0, 7.6), m2=(1.0, 2.0, 3.0))) == Thresholds(0, 0), "small sums go one way, large ones another"
    assert choose(times(m1=(6.0, 5.5, 7.6), m2=(1.0, 2.0, 3.0))) == Thresholds(0, 2)
    fewer = {1: {ONE: 3.0, TWO: 5.0, LARGE: 7.0}, 256: {TWO: 18.0, LARGE: 33.0}}  # one shot has no room for 256 rows
    assert choose(fewer) == Thresholds(1, 256)


def test_a_way_is_chosen_by_rows() -> None:
    found = Thresholds(8, 64)
    assert [found.way(rows) for rows in (1, 8, 9, 64, 65)] == [ONE, ONE, TWO, TWO, LARGE]
    assert default_thresholds(Config(2)).one == 128 and default_thresholds(Config(8, 256, 4)).one == 18


class Nothing:
    def all_reduce(self, address: int, count: int) -> Any:
        return f"reduce {count}"

    def all_gather(self, source: int, to: int, nbytes: int) -> Any:
        return f"gather {nbytes}"


def test_without_peer_memory_everything_goes_the_large_way(shim: Any) -> None:
    ops = CudaBackend(ShimDevice(shim))
    comm = PeerComm(ops, 0, 2, Nothing(), None, Thresholds(8, 64))
    x, out = ops.buffer("x", (4, 64)), ops.buffer("out", (4, 64))
    with ops.recording():
        comm.all_reduce(x)
        comm.all_reduce_norm(ops, x, out, ops.buffer("w", (64,)), 1e-5, out=out)
        assert [(r.op, str(r.run)[:10]) for r in ops.recorded] == [
            ("all_reduce", "reduce 256"), ("all_reduce", "reduce 256"), ("add_rms_norm", "add_rms_no"),
        ]  # fmt: skip
        with pytest.raises(ValueError, match=r"all_gather over 2 ranks: out is \[4, 64\] bf16 for x \[4, 64\] bf16"):
            comm.all_gather(x, out=out)


@pytest.mark.parametrize(("invariant", "ways"), [(False, [ONE, TWO, LARGE, LARGE, LARGE]), (True, [ONE, TWO, TWO, TWO, LARGE])])
def test_batch_invariant_sums_keep_to_rank_order_while_there_is_room(shim: Any, invariant: bool, ways: list[str]) -> None:
    memory = PeerMemory(Config(2, rows=256), Ranks(0, [0, 0], 0, 0), 128)
    comm = PeerComm(CudaBackend(ShimDevice(shim), invariant), 0, 2, Nothing(), memory, Thresholds(8, 64))
    assert [comm._way(DeviceArray(0, (rows, 128), "bf16")) for rows in (8, 64, 65, 256, 257)] == ways


def test_rows_of_another_width_are_refused(shim: Any) -> None:
    ops = CudaBackend(ShimDevice(shim))
    comm = PeerComm(ops, 0, 2, Nothing(), PeerMemory(Config(2), Ranks(0, [0, 0], 0, 0), 128))
    with pytest.raises(ValueError, match="rows of 64 numbers; this group was made for 128"):
        comm.all_reduce(DeviceArray(0, (4, 64), "bf16"))
