"""Distinct experts of a step on the CUDA worker over the CPU shim, against NumPy on the choices that each layer made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.tiny import make_tiny
from runtime.cuda_worker import CudaWorker
from runtime.kernels_cu import recorder
from runtime.kernels_cu.array import DeviceArray
from runtime.plan import pack_plan
from tests.plans import make_plan, page_table
from tests.runtime.graph.worlds import PAGE, SIZES, VOCAB, Pair


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A dense layer and three of experts."""
    return make_tiny(tmp_path_factory.mktemp("deep") / "model", seed=3, **{**SIZES, "num_hidden_layers": 4})


def hit_by_layer(worker: CudaWorker, plan) -> list[int]:
    """Runs the plan's launches one by one and looks at `expert` [M, k] after each layer's."""
    records = worker.program_of(plan.m, len(plan.out_rows)).records
    pack_plan(plan, worker._layout, worker._plan.blob.host)
    found = []
    for record in records:
        record.run.run(worker.driver.device.stream)
        if record.op == "moe_w4" and record.symbols:
            rows, top_k = record.symbols["M"], record.symbols["k"]
            address, _ = worker.backend.arena.held["expert"]
            chosen = worker.host(DeviceArray(address, (rows, top_k), "i32"))
            assert (chosen[plan.m :] == -1).all()
            found.append(len(np.unique(chosen[chosen >= 0])))
    return found


def plan_of(rng, tokens: int):
    parents = [list(range(-1, tokens - 1)), [-1, 0]]
    return make_plan([rng.integers(0, VOCAB, len(p)) for p in parents], parents, [0, 0], page_table(2, 2), PAGE)


@pytest.mark.parametrize(("most", "counted"), [(8, (0, 1, 2)), (2, (0, 2)), (1, (0,))])
def test_a_step_says_how_many_experts_its_layers_hit(path, shim, rng, monkeypatch, most, counted):
    """Small and large buckets, with dead rows, in turn: no list of an earlier step is counted."""
    monkeypatch.setattr(recorder, "MOST_UNIONS", most)
    pair = Pair(path, shim)
    seen = set()
    for tokens in (9, 1, 3, 9, 1):
        plan = plan_of(rng, tokens)
        result = pair.cuda.step(plan)
        hit = hit_by_layer(pair.cuda, plan)
        assert len(hit) == 3 and result.experts == pytest.approx(np.mean([hit[i] for i in counted]))
        seen.add(result.experts)
    assert len(seen) > 2


def test_it_is_the_definitions_count(path, shim, rng):
    """But for near ties of a router: within one expert of 16 on the mean of three layers."""
    pair = Pair(path, shim, sizes=(12,))
    plan = replace(plan_of(rng, 7), logprobs=np.zeros(2, np.int32))
    assert pair.cuda.step(plan).experts == pytest.approx(pair.truth.step(plan).experts, abs=1.0) != 0.0
