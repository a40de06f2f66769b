"""The cost curve of the CUDA worker over the CPU shim: every size of its graphs is measured, and the budget on it changes no text."""

from __future__ import annotations

import pytest

from runtime import measure
from runtime.allocate import BudgetSpeculation
from runtime.config import SpeculativeConfig
from runtime.curve import CurveKey
from runtime.measure import measure_curve
from runtime.speculate import NoSpeculation
from tests.runtime.graph.test_worker_shim import SAMPLING, check_same, requests_for
from tests.runtime.graph.worlds import Pair, tiny_model
from tests.worlds import run

AUTO = SpeculativeConfig(method="ddtree", tree_budget="auto")


@pytest.mark.slow
def test_the_workers_sizes_are_measured_and_used(tmp_path, shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CAPTURED_BUDGET_S", 120.0)
    pair = Pair(tiny_model(tmp_path), shim)
    curve = measure_curve(pair.cuda, pair.config, AUTO, CurveKey("shim", "tiny", 1))
    step = curve._steps[0]
    assert step.edges.tolist() == [1, 4, 12] and (step.count > 1).all() and curve._draft.count.any()
    requests = requests_for(SAMPLING["greedy"])
    want = run(pair.engine(pair.cuda, NoSpeculation()), requests)
    budget = BudgetSpeculation(pair.cuda, AUTO, curve)
    engine = pair.engine(pair.cuda, budget)
    assert check_same(run(engine, requests), want, True) > 12
    assert {record.bucket for record in engine.stats().budget_records} <= {1, 4, 12}
