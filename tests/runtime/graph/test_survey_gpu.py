"""The cost curve on a GPU: every captured size in the time of a start, long contexts, and a budget on it that changes no text.

    python -m pytest -q -m gpu tests/runtime/graph/test_survey_gpu.py

Recorded in tools/results/gpu_tests.jsonl (`tools/gpu_tests.py --check`).
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from runtime import SamplingParams
from runtime.allocate import BudgetSpeculation
from runtime.config import SpeculativeConfig
from runtime.curve import CostCurve, CurveKey
from runtime.measure import measure_curve
from runtime.speculate import NoSpeculation
from tests.runtime.graph.device_worlds import DeviceWorld, open_world, requests_for
from tests.worlds import run

pytestmark = pytest.mark.gpu
AUTO = SpeculativeConfig(method="ddtree", tree_budget="auto")


@pytest.fixture(scope="module")
def world() -> DeviceWorld:
    world = open_world((1, 2, 8, 16, 24, 64, 128, 256, 1024), batch_invariant=True)
    world.worker.capture()
    return world


@pytest.fixture(scope="module")
def measured(world: DeviceWorld) -> tuple[CostCurve, float]:
    start = time.perf_counter()
    curve = measure_curve(world.worker, world.config, AUTO, CurveKey("gpu", "demo", 1))
    return curve, time.perf_counter() - start


def test_a_start_takes_less_than_20_s_and_leaves_no_size_out(world: DeviceWorld, measured: tuple[CostCurve, float]) -> None:
    curve, seconds = measured
    assert seconds < 20
    short, medium, long = curve._steps[:3]
    assert (short.count > 0).all(), dict(zip(short.edges.tolist(), short.count.tolist(), strict=True))
    assert medium.count.any() and long.count.any(), "10,000 and 40,000 tokens fit these pages"
    assert (curve._draft.count > 0).sum() >= 5 and curve.overhead_s > 0
    ms = curve.step(curve.buckets) * 1e3
    print({m: round(t, 3) for m, t in zip(curve.buckets.tolist(), ms.tolist(), strict=True)}, f"draft {curve.draft(8) * 1e3:.3f} ms")
    assert ms[-1] > ms[0] and (np.diff(ms) >= -1e-9).all()
    assert float(curve.step(64, 40_000)) > 0.9 * float(curve.step(64, 0)), "a longer context is not cheaper"


@pytest.mark.parametrize("streams", [1, 16])
def test_the_budget_changes_no_text(world: DeviceWorld, measured: tuple[CostCurve, float], streams: int) -> None:
    """Rows do not depend on their company here. A tree's equal plain ones up to the order of one sum: a near-tie may part two texts."""
    requests = requests_for(world.prompts(streams), SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    want = run(world.engine(NoSpeculation()), requests)
    engine = world.engine(BudgetSpeculation(world.worker, AUTO, measured[0]))
    got = run(engine, requests)
    parted = [id for id in want if got[id].tokens != want[id].tokens]
    assert len(parted) <= streams // 8, f"{len(parted)} of {streams} texts differ: {parted}"
    stats = engine.stats()
    assert stats.budget_steps > 0 and stats.realised_tokens == pytest.approx(stats.expected_tokens, rel=0.5)
