"""The bench of draws over ranks on the CPU shim: every case runs and compares its tokens; no time is taken."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.kernels_cu import sample_ranks
from runtime.kernels_cu.all_reduce import Ranks
from runtime.kernels_cu.peer_comm import PeerComm, PeerMemory
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from tests.forks import on_ranks
from tests.runtime.graph.test_ranks_shim import DRAWING, PEERS, WORLD, HostLarge
from tests.shim_device import ShimDevice
from tools import bench_draw_ranks as bench


class Peers:
    """`peers_cuda` without a GPU."""

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def open_peers(self, ops: Any, host: Any, hidden: int) -> PeerComm:
        notes, told = ops.device.alloc(DRAWING.state_bytes()), ops.device.alloc(4)
        seat = sample_ranks.Seat(DRAWING, Ranks(host.rank, self.places, notes, told))
        return PeerComm(ops, host.rank, WORLD, HostLarge(host), PeerMemory(PEERS, Ranks(host.rank, [0, 0], 0, told), hidden, None, seat))

    def time_us(self, stream: int, run: Any) -> float:
        run.run(stream)
        return 1.0

    def _slowest(self, host: Any, us: float) -> float:
        return us


@pytest.mark.slow
def test_cases_run_and_tokens_are_compared(shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VOCAB": 1024, "HIDDEN": 64, "LATENT": 64, "COLD_BYTES": 20_000}.items():
        monkeypatch.setattr(bench, name, value)
    block = SharedBlock.create(LINE + SharedComm.nbytes(WORLD))
    regions = [SharedBlock.create(DRAWING.region_bytes()) for _ in range(WORLD)]
    places = [int(region.array(0, 1).ctypes.data) for region in regions]

    def on_rank(rank: int) -> list[dict[str, Any]]:
        host = SharedComm(rank, WORLD, block, LINE, Watch(block, 0, 60.0))
        one = bench.Bench(rank, WORLD, host, Peers(places), ShimDevice(shim))
        found = [one.draw(rows, way) for rows in (1, 5) for way in bench.WAYS] + [one.latent(rows) for rows in (1, 8)]
        monkeypatch.setattr(bench, "define", lambda *_, **out: out["target"].fill(-1))
        with pytest.raises(SystemExit, match="tokens differ"):
            one.draw(1, "draw")
        return found

    found = on_ranks(WORLD, on_rank, 120.0)[0]
    assert [case["kind"] for case in found] == ["draw"] * 12 + ["latent"] * 2
