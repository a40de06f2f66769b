"""Sizes of steps for a load: against every subset, on recorded traces, and what they are printed with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from runtime.curve import CostCurve, CurveKey
from runtime.trace import StepTrace
from tests.scripted import ScriptedExecutor, make_engine, run_all
from tests.workloads import REQUESTS
from tools import buckets, simulate, tune
from tools.replay import grow_states, load_states

KEY = CurveKey("test", "none", 1)
GAIN = (np.array([0.0, 1, 3, 7, 15]), np.array([0.0, 0.8, 1.7, 2.4, 2.7]))
TRACES = Path(__file__).parents[1] / "fixtures" / "draft_traces.npz"


def linear(most: int = 64, base: float = 8.0) -> CostCurve:
    edges = tuple(range(1, most + 1))
    return CostCurve(edges, tuple(base + m for m in edges), key=KEY)


def test_candidates_rise_to_the_end() -> None:
    for most in (1, 5, 64, 1000, 1024):
        found = buckets.candidates(most)
        assert found[-1] == most and found == sorted(set(found)) and len(found) < 60


def test_no_other_set_of_that_size_is_much_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sets of three and four sizes out of eleven, scored one by one."""
    monkeypatch.setattr(buckets, "candidates", lambda most: [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, most])
    chooser = buckets.Chooser(linear(), buckets.read_load(["1:5", "6:3", "10:1"]), GAIN)
    for count in (3, 4):
        found = [size.rows for size in chooser.choose(count, worth=0.0).sizes]
        best = max(chooser.score([*some, 64]) for some in itertools.combinations(buckets.candidates(64)[:-1], count - 1))
        assert found[-1] == 64 and len(found) == count and chooser.score(found) > best - 0.02


def test_sizes_follow_the_load() -> None:
    few = buckets.Chooser(linear(), buckets.read_load(["1"]), GAIN).choose()
    many = buckets.Chooser(linear(), buckets.read_load(["16"]), GAIN).choose()
    assert {1, 4, 8} & {size.rows for size in few.sizes} and min(size.rows for size in many.sizes) == 16
    assert all(size.loss > 0 for size in few.sizes[:-1]), "each size is worth something"
    flat = CostCurve((1, 64), (1.0, 1.0), key=KEY)
    assert [size.rows for size in buckets.Chooser(flat, buckets.read_load(["4"]), GAIN).choose().sizes] == [64]


def test_fixed_trees_are_fitted_exactly() -> None:
    """Nine rows a stream, nothing chosen: the sizes are the multiples that occur, where candidates have them."""
    cases = buckets.read_load(["2:1", "4:1"], nodes=7)
    found = buckets.Chooser(linear(), cases, GAIN).choose()
    assert [size.rows for size in found.sizes] == [16, 32, 64]
    with pytest.raises(ValueError, match="a step of 80 rows, the curve ends at 64"):
        buckets.Chooser(linear(), buckets.read_load(["10"], nodes=7), GAIN)


def test_fewer_sizes_keep_the_speed_on_recorded_drafts() -> None:
    """The suggestion knows mean acceptance alone; replayed drafts find its sizes as good as the curve's own 17."""
    name, curve = simulate.find_curve("h200-tp8")
    chooser = buckets.Chooser(curve, buckets.read_load(["1", "2", "4", "8", "16", "32", "64"]), buckets.read_gain(simulate.RESULTS))
    sizes = [size.rows for size in chooser.choose().sizes]
    assert len(sizes) <= 13
    states = load_states(TRACES)
    grown = grow_states(states)
    for streams in (1, 8, 16):
        own, fewer = (
            simulate.Replay(name, held, states, grown).auto(streams, "auto", calibrated=True, eased=True).tok_s
            for held in (curve, chooser.curve(sizes))
        )
        assert fewer > 0.98 * own


def test_a_recorded_load_is_read_from_a_trace(tmp_path: Path) -> None:
    """Streams and prompt rows of every step, also of a file that was never closed."""
    path = tmp_path / "trace.json"
    run = ScriptedExecutor(num_pages=200, max_rows=32)
    engine = make_engine(run, max_num_seqs=4)
    trace = StepTrace(path)
    engine.trace_to(trace)
    run_all(engine, REQUESTS[:8])
    trace.close()
    steps = [e["args"] for e in json.loads(path.read_text()) if e["name"] == "step"]
    assert sum(s["prompt"] for s in steps) + sum(s["streams"] for s in steps) == sum(s["rows"] for s in steps), "no drafts, so nothing else"
    cases = buckets.read_load([str(path)])
    assert {c.streams for c in cases} <= {1, 2, 3, 4} and sum(c.weight for c in cases) == pytest.approx(1.0)
    assert any(c.prompt for c in cases) and all(c.prompt % buckets.PROMPT_STEP == 0 for c in cases)
    cut = path.read_text()[: -len("\n]") - 3]
    path.write_text(cut[: cut.rindex("},") + 2])
    assert buckets.read_load([str(path)])
    for bad in (["x"], ["0:1"], ["1:-2"], ["2:y"]):
        with pytest.raises(ValueError, match="load"):
            buckets.read_load(bad)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a trace"):
        buckets.read_load([str(path)])


def test_the_command_prints_sizes_reasons_and_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--buckets", "--curve", "rtxpro6000-tp8", "--load", "1:3", "16:1", "--count", "6"])
    shown = capsys.readouterr().out
    last = shown.strip().splitlines()[-1].split()
    assert last[0] == "--cudagraph-capture-sizes" and last[-1] == "1024" and len(last) - 1 <= 6
    assert "16 streams of up to" in shown and "without it -" in shown and "instead of 17" in shown
    records = tmp_path / "r.jsonl"
    records.write_text(json.dumps({"policy": "plain"}))
    with pytest.raises(ValueError, match="0 sizes of trees"):
        buckets.read_gain(records)
