"""The measured curve: on the demo model, stored, read back, and learned from again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from runtime import LLM, SamplingParams, measure, survey
from runtime.allocate import BudgetSpeculation
from runtime.config import SpeculativeConfig
from runtime.curve import CurveKey
from runtime.measure import default_buckets, find_curve, measure_curve
from runtime.speculate import NoSpeculation
from tests.test_lossless import SAMPLING, requests_for
from tests.worlds import World, demo_world, run

AUTO = SpeculativeConfig(method="ddtree", tree_budget="auto")
KEY = CurveKey("cpu", "demo", 1)


@pytest.fixture(scope="module")
def world() -> World:
    return demo_world()


@pytest.mark.parametrize("most", [1, 7, 8, 9, 64, 513, 2048])
def test_default_buckets_rise_to_the_end(most: int) -> None:
    edges = default_buckets(most)
    assert edges[0] == 1 and edges[-1] == most and list(edges) == sorted(set(edges)) and len(edges) < 70
    assert all(b - a <= max(1, a / 8) for a, b in itertools.pairwise(edges))


def test_more_rows_cost_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BUDGET_S", 60.0)  # never all of it
    monkeypatch.setattr(survey, "LONG_CONTEXTS", ())
    monkeypatch.setattr(survey, "STREAMS", (1, 4))
    config = world.config.replace(max_num_seqs=4, max_num_batched_tokens=64)
    curve = measure_curve(world.executor, config, AUTO, KEY)
    assert 0 < float(curve.step(1)) < float(curve.step(16)) < float(curve.step(64)) < 10
    assert curve.draft(1) > 0 and 0 < float(curve.host.at(1, 1, True)) < float(curve.step(1))
    assert curve.buckets[-1] == config.max_num_batched_tokens


def test_text_equals_plain_decoding_on_the_demo_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that change from step to step with the measured times change no text."""
    monkeypatch.setattr(measure, "BUDGET_S", 0.5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 250, int(n)).tolist() for n in rng.integers(2, 40, 24)]
    curve = measure_curve(world.executor, world.config, AUTO, KEY)
    for params in SAMPLING.values():
        requests = requests_for(prompts, params)
        want = run(world.engine(NoSpeculation()), requests)
        engine = world.engine(BudgetSpeculation(world.executor, AUTO, curve))
        got = run(engine, requests)
        assert [(g.tokens, g.text, g.finish) for g in got.values()] == [(g.tokens, g.text, g.finish) for g in want.values()]
        assert [g.logprobs for g in got.values()] == [g.logprobs for g in want.values()]
    assert engine.stats().budget_steps > 0


def test_a_curve_is_kept_by_machine_model_and_ranks(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BUDGET_S", 0.1)
    first, whence = find_curve(world.executor, world.config, AUTO, KEY, tmp_path)
    assert whence == "measured"
    again, whence = find_curve(world.executor, world.config, AUTO, KEY, tmp_path)
    assert whence.startswith("read from") and again.to_json() == first.to_json()
    assert find_curve(world.executor, world.config, AUTO, CurveKey("cpu", "demo", 2), tmp_path)[1] == "measured"
    other = world.config.replace(max_num_batched_tokens=64)
    assert find_curve(world.executor, other, AUTO, KEY, tmp_path)[1] == "measured", "other buckets"
    [path] = tmp_path.glob("*tp1.json")
    path.write_text("{")
    assert find_curve(world.executor, world.config, AUTO, KEY, tmp_path)[1] == "measured", "a broken file is measured anew"
    assert json.loads(path.read_text())["gpu"] == "cpu"
    assert find_curve(world.executor, world.config, AUTO, KEY, None)[1] == "measured"


def test_the_option_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measure, "BUDGET_S", 0.2)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    plain = LLM("demo", **options).generate(["def add(a, b):"] * 2, params)
    auto = LLM("demo", speculative_config={"method": "ddtree", "tree_budget": "auto"}, **options)
    assert [o.outputs[0].token_ids for o in auto.generate(["def add(a, b):"] * 2, params)] == [o.outputs[0].token_ids for o in plain]
    stats = auto.loaded.engine.stats()
    assert stats.budget_steps == stats.steps > 0 and stats.realised_tokens >= 22
    assert list((tmp_path / "curves").glob("*.json"))
