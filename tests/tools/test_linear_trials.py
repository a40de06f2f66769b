"""Ways of getting weights and x: what is tried beside what is served, without a GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from runtime.kernels_cu.linear_choice import choose_stream, source_digest
from runtime.kernels_cu.linear_stream import widened
from tools import linear_trials
from tools.bench_linear import kimi_shapes
from tools.linear_trials import Trial, report, ways


def test_ways_differ_from_what_is_served_in_what_they_are_named_for():
    for shape in kimi_shapes():
        found = ways(shape)
        served = choose_stream(shape.dims(16), "h200")[0]
        assert next(iter(found.values())) == served and len(set(found.values())) == len(found)
        assert replace(found["kept"], kept=False) == served and found["kept"] != served
        assert replace(found["both"], kept=False) == found["carried"] and found["carried"].carried
        same = ("groups", "tall", "blocks", "early")
        assert [getattr(found["carried"], name) for name in same] == [getattr(served, name) for name in same]
        assert served.slots - found["carried"].slots in (0, 1)
        for config in found.values():
            for m in (1, 8, 16):
                widened(config, m).check(shape.dims(m))


def fake_bench(**us: list[float]) -> SimpleNamespace:
    square = next(s for s in kimi_shapes() if s.name == "square")
    case = SimpleNamespace(shape=square, dims=square.dims(8), calls=24)
    return SimpleNamespace(case=case, trials=[Trial(way, ways(square)[way], case, None, 1e-3, times) for way, times in us.items()])


def test_medians_are_compared_with_the_first_and_with_the_read_rate(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    bench = fake_bench(served=[27.0, 26.0, 90.0], carried=[25.0, 25.2, 24.0], kept=[])
    report(bench, 4.5e12, argparse.Namespace(json=path), {"commit": "abc", "src": "of another kernel"})
    served, carried = (json.loads(line) for line in path.read_text().splitlines())
    assert (served["us"], carried["us"], served["gain"]) == (27.0, 25.0, 0.0)
    assert carried["gain"] == pytest.approx(25 / 27 - 1, abs=1e-4)
    assert carried["share"] == pytest.approx((2 * 7168 * 7168 + 4 * 8 * 7168) / 4.5e12 * 1e6 / 25, abs=1e-4)
    assert served["src"] == source_digest("stream") != carried["src"] == source_digest("stream", {"carried": True})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_without_a_gpu_it_runs_nothing_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(linear_trials, "has_gpu", lambda: False)
    monkeypatch.setattr(linear_trials, "compile_all", lambda shapes, rows: len(shapes))
    linear_trials.main([])
    assert "nothing was run" in capsys.readouterr().out
    for wrong in (["--m", "17"], ["--shapes", "nothing"]):
        with pytest.raises(SystemExit):
            linear_trials.main(wrong)
