"""The host bench: a case without a model, the engine as served, and what a projection says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.stats import STAGES, EngineStats
from tools import bench_host


def test_a_case_without_a_model_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.jsonl"
    given = ["--streams", "2", "--policies", "plain", "tree:8", "auto", "--steps", "5", "--json", str(out)]
    assert bench_host.main(given) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["policy"] for r in records] == ["plain", "tree:8", "auto"] and "projected" in capsys.readouterr().out
    for record in records:
        assert set(record["us"]) == {*STAGES, "between"} and record["streams"] == 2 and record["commit"]
        assert 0 < record["exposed_us"] < 1e5 and record["us"]["accept"] > 0
        assert all(0 < share < 1 for share in record["projected"].values()) and "device time" in record["assumes"]
    assert [r["M"] for r in records][:2] == [2, 24] and records[0]["us"]["grow"] == 0 < records[1]["us"]["grow"]


def test_a_device_takes_what_a_curve_says(tmp_path: Path) -> None:
    out = tmp_path / "host.jsonl"
    given = ["--streams", "4", "--policies", "plain", "chain", "--steps", "10", "--flights", "h200-k26-6", "--json", str(out)]
    assert bench_host.main(given) == 0
    plain, chain = (json.loads(line) for line in out.read_text().splitlines())
    assert 200 < plain["tok_s"] < 4 / 2.3e-3, "2.4 ms a step"
    assert chain["M"] == 32 and chain["tok_s"] < 32 / 6.5e-3, "6.6 ms and a draft"


def test_a_projection_is_a_share_of_the_recorded_step() -> None:
    steps = [json.loads(line) for line in bench_host.STEPS.read_text().splitlines()]
    [ms] = [s["ms"] for s in steps if s.get("M") == 64 and s["layers"] == 8]
    assert bench_host.projected(100.0, 64)["8 layers, TP 1"] == round(100.0 / (1e3 * ms + 100.0), 4)
    assert bench_host.projected(100.0, 64, bench_host.FULL) == {bench_host.FULL: bench_host.projected(100.0, 64)[bench_host.FULL]}
    assert bench_host.projected(200.0, 64)["8 layers, TP 1"] > bench_host.projected(100.0, 64)["8 layers, TP 1"]


def test_what_was_exposed_between_two_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("runtime.stats.time.perf_counter", lambda: now[0])
    before, after = EngineStats(), EngineStats()
    for stats, steps in ((before, 1), (after, 3)):
        for _ in range(steps):
            stats.take_off()
            stats.land(late=steps == 3)
            with stats.stage("accept"):
                now[0] += 0.001
            stats.count_step(64, 60, 0.010, flown_s=0.009)
    found = bench_host.exposures(before, after)
    assert (found["M"], found["steps"], found["step_us"], found["share"]) == (64, 2, 10_000.0, 0.1)
    assert found["exposed_us"] == pytest.approx(1000.0) and found["us"]["accept"] == pytest.approx(1000.0) and found["late"] == 3
