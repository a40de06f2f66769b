"""q_a and kv_a cut over ranks: the parts are the whole's rows, and the logits those of replicated ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model import kimi_k26
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.hw import find_hardware
from runtime.kernels_np import NumpyBackend
from runtime.load_config import LoadConfig
from runtime.planning import memory_per_rank, plan_step
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from runtime.source import cut_stacked
from tests.forks import on_ranks
from tests.plans import PAGE, make_plan, page_table


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cut") / "tiny", seed=4, num_hidden_layers=2)


def test_rows_of_stacked_matrices() -> None:
    assert list(cut_stacked(slice(0, 10), (6, 4))) == [(0, slice(0, 6)), (1, slice(0, 4))]
    assert list(cut_stacked(slice(5, 10), (6, 4))) == [(0, slice(5, 6)), (1, slice(0, 4))]
    assert list(cut_stacked(slice(0, 5), (6, 4))) == [(0, slice(0, 5))] and list(cut_stacked(slice(6, 8), (6, 4))) == [(1, slice(0, 2))]


def logits(tiny: Path, world: int, cut: bool, shuffled: bool = False) -> np.ndarray:
    ckpt = Checkpoint.open(tiny)
    c = replace(kimi_k26.Config.from_json(ckpt.config), cut_latent=cut)
    block = SharedBlock.create(LINE + SharedComm.nbytes(world))
    plan = make_plan([[3, 9, 4, 7], [5, 6]], [[-1, 0, 1, 2], [-1, 0]], [0, 0], page_table(2, 2))

    def on_rank(rank: int) -> np.ndarray:
        ops, comm = NumpyBackend(), SharedComm(rank, world, block, LINE, Watch(block, 0, 30.0))
        w = kimi_k26.load(ckpt, c, ops, rank, world, 64)
        if shuffled:
            w = replace(w, layers=tuple(replace(layer, qkv_a=np.roll(layer.qkv_a, rank, axis=0)) for layer in w.layers))
        assert len(w.layers[0].qkv_a) == (c.q_rank + c.cache_width) // (world if cut else 1)
        made = kimi_k26.forward(ops, comm, c, w, plan, ops.zeros((c.layers, 5 * PAGE, c.cache_width)), PAGE)
        assert made is not None
        return made[0].copy()

    return np.concatenate(on_ranks(world, on_rank), axis=1)


@pytest.mark.parametrize("world", [2, 4])
def test_logits_are_those_of_replicated_weights(tiny: Path, world: int) -> None:
    want = logits(tiny, world, False)
    assert np.abs(logits(tiny, world, True) - want).max() < 1e-4 < np.abs(want).max()
    assert np.abs(logits(tiny, world, True, shuffled=True) - want).max() > 1e-2


def test_a_source_is_asked_for_it_and_sizes_are_checked(tiny: Path) -> None:
    source = loading.open_source(tiny, SpeculativeConfig(method="none"), LoadConfig(cut_latent=True))
    assert source.target.cut_latent and not loading.open_source(tiny, SpeculativeConfig(method="none")).target.cut_latent
    odd = replace(source.target, q_rank=source.target.q_rank + 1)
    with pytest.raises(ValueError, match=f"tensor_parallel_size 2 does not divide.*q_a and kv_a {odd.q_rank + odd.cache_width}"):
        odd.check_tp(2)


def test_what_it_costs() -> None:
    """A rank's part of the weight is read, and 61 gathers are added."""
    whole = loading.open_source("kimi-k26", SpeculativeConfig(method="none"), LoadConfig("dummy")).target
    cut, h200 = replace(whole, cut_latent=True), find_hardware("h200")
    a, b = (plan_step(c, 8, 64, 0, h200) for c in (whole, cut))
    assert a.cost.read_bytes - b.cost.read_bytes == pytest.approx(61 * 2112 * 7168 * 2 * 7 / 8, rel=1e-6)
    gathers = [row for row in b.table if row.op == "all_gather" and row.dims == "row=4224B"]
    assert [row.count for row in gathers] == [61] and gathers[0].cost.read_bytes == 61 * 64 * 4224 * 7 / 8
    assert memory_per_rank(whole, 8).weight_bytes - memory_per_rank(cut, 8).weight_bytes == 61 * 2112 * 7168 * 2 * 7 // 8
