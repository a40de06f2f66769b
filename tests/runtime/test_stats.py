"""What stats say of experts, the threshold, ranks of accepted nodes, and the ranges of a profiler."""

from __future__ import annotations

import json
import logging
import types
from pathlib import Path

import numpy as np
import pytest

from runtime.accept import ranks_of
from runtime.kernels_np import NumpyBackend, moe
from runtime.nvtx import find_ranges
from runtime.stats import STAGES, SURE_STEPS, EngineStats
from runtime.trace import StepTrace
from runtime.types import DraftTree
from runtime.w4 import pack
from tests.scripted import ScriptedExecutor, make_engine, make_request, run_all, scattered, tokens_of
from tests.waits import turns


def timed(times_ms: dict[int, float], steps: int = SURE_STEPS) -> EngineStats:
    stats = EngineStats()
    for rows, ms in times_ms.items():
        for _ in range(steps):
            stats.count_step(rows, rows, ms / 1e3)
    return stats


def test_the_threshold_is_where_rows_become_cheap() -> None:
    climbing = {1: 1.0, 2: 1.9, 4: 3.7, 8: 7.0, 16: 12.0, 32: 18.0}
    flat = {64: 20.0, 128: 21.0}
    assert timed(climbing).threshold is None
    assert timed({**climbing, **flat}).threshold == 32, "(20 - 18) / 32 < 18 / 32 / 4"
    assert timed({**climbing, 64: 29.0}).threshold is None, "(29 - 18) / 32 is more than a quarter of 18 / 32"
    assert timed({**climbing, **flat}, SURE_STEPS - 1).threshold is None, "too few steps say nothing"
    assert EngineStats().threshold is None


def test_experts_are_summed_over_the_steps_that_counted_them(tmp_path: Path) -> None:
    stats = EngineStats(experts_total=8)
    with StepTrace(tmp_path / "t.json") as trace:
        stats.trace = trace
        for hit in (4.0, 0.0, 6.5):
            stats.count_step(8, 5, 0.01, hit)
    assert (stats.experts, stats.experts_sum, stats.experts_steps, stats.steps) == (6.5, 10.5, 2, 3)
    events = json.loads((tmp_path / "t.json").read_text())
    assert [e["args"].get("experts") for e in events if e["name"] == "step"] == [4.0, None, 6.5]
    assert [e["args"]["experts"] for e in events if e["ph"] == "C" and e["name"] == "experts"] == [4.0, 6.5]


def test_the_backend_counts_distinct_experts() -> None:
    rng, ops = np.random.default_rng(1), NumpyBackend()
    experts, hidden, width, rows, top_k = 12, 128, 64, 5, 3
    packed = [
        moe.Experts(pack(rng.integers(1, 16, s).astype(np.uint8), np.full((*s[:2], s[2] // 32), 0.01, "bfloat16")))
        for s in ((experts, 2 * width, hidden), (experts, hidden, width))
    ]
    x, base, out = (np.zeros((rows, hidden), np.float32) for _ in range(3))
    weight, sizes = np.full((rows, top_k), 1 / top_k, np.float32), []
    for _ in range(7):
        expert = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32)
        sizes.append(len(set(expert.ravel().tolist())))
        ops.moe_w4(x, expert, weight, *packed, base, out=out)
    assert len(set(sizes)) > 1 and ops.experts_hit() == pytest.approx(sum(sizes) / 7)
    assert ops.experts_hit() == 0.0, "each call counts once"


def test_ranks_are_places_among_siblings() -> None:
    #        0
    #      / | \        node 4 is the second child of 1, node 6 the first of 3
    #     1  2  3
    #    / \     \
    #   5?  4     6
    tree = DraftTree(np.arange(7, dtype=np.int32), np.array([-1, 0, 0, 0, 1, 1, 3], np.int16), np.array([0, 1, 1, 1, 2, 2, 2], np.int16))
    assert ranks_of(tree, [1, 5]) == (0, 1)
    assert ranks_of(tree, [3, 6]) == (2, 0)
    assert ranks_of(tree, []) == ()


def test_ranks_come_with_emissions_and_sum_to_the_accepted() -> None:
    engine = make_engine(ScriptedExecutor(guess=scattered(5)), {"tree_budget": 12})
    got = run_all(engine, [make_request(f"{i}", [7, i], max_tokens=40, ignore_eos=True) for i in range(4)])
    stats = engine.stats()
    emissions = [e for mine in got.values() for e in mine]
    assert all(len(e.ranks) == (e.accepted or 0) for e in emissions)
    assert sum(stats.accepted_per_rank.values()) == stats.accepted_tokens > 0
    assert len(stats.accepted_per_rank) > 1, "the scattered guess is right at several ranks"
    assert sum(len(tokens_of(mine)) for mine in got.values()) == stats.generation_tokens


class Marks:
    """A profiler's ranges, written down."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append("/".join(self.open))

    def pop(self) -> None:
        self.open.pop()


def test_every_stage_is_a_range_also_where_it_fails() -> None:
    engine = make_engine(ScriptedExecutor(guess=scattered(1), fail_at=4), {"tree_budget": 4})
    marks = engine._stats.ranges = Marks()
    engine.submit(make_request("a", [7], max_tokens=20, ignore_eos=True))
    for _ in turns(lambda: engine.dead is None, "an engine that lives on"):
        engine.step()
    assert set(marks.seen) == set(STAGES), "and none inside another"
    assert marks.open == [], "the step that raised closed its range"


def test_ranges_come_from_what_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    ours = types.SimpleNamespace(push_range=said.append, pop_range=lambda: said.append("pop"))
    theirs = types.SimpleNamespace(RangePush=said.append, RangePop=lambda: said.append("Pop"))

    def having(**modules: object) -> object:
        def load(name: str) -> object:
            if name not in modules:
                raise ImportError(name)
            return modules[name]

        return find_ranges(load)

    for ranges in (having(nvtx=ours), having(**{"cupy.cuda.nvtx": theirs})):
        assert ranges is not None
        ranges.push("verify")  # type: ignore[attr-defined]
        ranges.pop()  # type: ignore[attr-defined]
    assert said == ["verify", "pop", "verify", "Pop"]
    assert having() is None and "pip install nvtx" in caplog.text and caplog.records[-1].levelno == logging.WARNING
