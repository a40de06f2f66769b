"""The trace of steps: valid at any moment, stages inside their step, bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime import trace as module
from runtime.stats import STAGES
from runtime.trace import StepTrace
from tests.scripted import ScriptedExecutor, make_engine, make_request, run_all, scattered


def opened(path: Path) -> list[dict[str, Any]]:
    """As a viewer reads it: the closing bracket may be absent."""
    text = path.read_text(encoding="utf-8").rstrip().rstrip(",")
    return json.loads(text if text.endswith("]") else text + "]")


def test_every_stage_lies_inside_its_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = make_engine(ScriptedExecutor(guess=scattered(1)), {"tree_budget": 8})
    with StepTrace(path) as trace:
        engine.trace_to(trace)
        run_all(engine, [make_request(f"{i}", [7, i], max_tokens=12, ignore_eos=True) for i in range(3)])
    events = json.loads(path.read_text(encoding="utf-8"))
    spans = [e for e in events if e["ph"] == "X"]
    steps = [e for e in spans if e["name"] == "step"]
    assert len(steps) == engine.stats().steps > 3
    assert {e["name"] for e in spans} == {"step", *STAGES}
    for step in steps:
        start, end = step["ts"], step["ts"] + step["dur"]
        inside = {e["name"] for e in spans if e is not step and start - 1 <= e["ts"] and e["ts"] + e["dur"] <= end + 1}
        assert {"plan", "verify", "accept"} <= inside
        assert 0 < step["args"]["rows"] <= step["args"]["M"] and 0 < step["args"]["host_us"] < step["dur"]
        assert any(e["name"] == "emit" and e["ts"] >= end - 1 for e in spans), "what a step says comes after it"
    assert sum(e["args"]["rows"] for e in steps) == engine.stats().rows
    before = path.stat().st_size
    run_all(engine, [make_request("late", [7], max_tokens=3)])
    assert path.stat().st_size == before, "a closed trace takes nothing more, and the engine goes on"


def test_a_trace_that_was_cut_off_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_EVENTS", 1)
    trace = StepTrace(tmp_path / "trace.json")
    trace.span("step", 0.0, 0.1)
    assert [e["name"] for e in opened(tmp_path / "trace.json")][-1] == "step"
    trace.close()
    trace.close()
    assert opened(tmp_path / "trace.json") == json.loads((tmp_path / "trace.json").read_text())


def test_a_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    with StepTrace(tmp_path / "trace.json") as trace:
        for _ in range(100):
            trace.span("step", 0.0, 0.1)
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 11, "ten and the one that closes it"


def test_without_a_trace_nothing_is_written() -> None:
    engine = make_engine(ScriptedExecutor())
    run_all(engine, [make_request("a", [7], max_tokens=3)])
    assert engine.stats().trace is None
