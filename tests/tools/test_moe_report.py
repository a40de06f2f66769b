"""The MoE benchmark's analysis and its prediction without a GPU."""

from __future__ import annotations

import json
import math

import pytest

from runtime.hw import find_hardware
from tools import bench_moe
from tools.moe_report import Row, Shape, analyse, compute_ridge, draw, find_plateau, find_threshold, fit_streaming, predicted_rows

K26 = Shape(384, 7168, 2048, 8)
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


def test_fit_recovers_bandwidth_and_fixed_part():
    rows = [Row(m, 0.01 + gb / 4.2, e, gb) for m, gb, e in ((1, 0.2, 8), (2, 0.4, 16), (8, 1.5, 60), (16, 2.7, 110))]
    fixed, tb_s = fit_streaming(rows, 384)
    assert math.isclose(tb_s, 4.2, rel_tol=1e-6) and math.isclose(fixed, 0.01, rel_tol=1e-6)
    slower = [Row(r.M, r.ms * 1.1, r.experts, r.gb) for r in rows]
    assert fit_streaming(slower, 384)[1] < 3.9


def test_threshold_and_plateau():
    rows = [Row(1, 1.0, 8, 1), Row(2, 1.9, 16, 2), Row(4, 3.5, 30, 4), Row(8, 4.2, 60, 5), Row(16, 4.4, 100, 5), Row(32, 9.0, 200, 5)]
    assert find_threshold(rows) == 4  # (4.2 - 3.5) / 4 = 0.175 < 0.25 * 3.5 / 4
    assert find_plateau(rows, 4) == (4, 8)
    assert find_threshold(rows[:3]) is None and find_plateau(rows, None) is None


def test_ridge_is_where_floors_meet():
    h200 = find_hardware("h200")
    m = compute_ridge(K26, h200.read_bps, h200.tensor_flops)
    assert math.isclose(K26.flops(m) / h200.tensor_flops, 384 * K26.expert_bytes / h200.read_bps)
    assert 2000 < m < 2600


def test_prediction_is_above_the_floor():
    h200 = find_hardware("h200")
    for row in predicted_rows(K26, SIZES, h200):
        assert row.ms > row.gb / h200.read_bps * 1e12 and row.ms > K26.flops(row.M) / h200.tensor_flops * 1e3


def test_plot_is_deterministic_and_marks_the_threshold():
    h200 = find_hardware("h200")
    rows = predicted_rows(K26, SIZES, h200)
    first = draw(rows, K26, h200.read_bps, h200, "t", SIZES)
    assert first == draw(rows, K26, h200.read_bps, h200, "t", SIZES)
    assert first.startswith("<svg") and "M* " in first and "ridge" in first and "nan" not in first


def test_analysis_names_its_assumptions():
    h200 = find_hardware("h200")
    words = analyse(predicted_rows(K26, SIZES, h200), K26, h200.read_bps, 8, h200)
    for part in ("streaming regime", "threshold M*", "compute ridge", "streams x (7 + 1)", "all-reduce", "byte floor"):
        assert part in words


def test_without_a_gpu_the_curve_is_marked_as_predicted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_moe, "has_gpu", lambda: False)
    bench_moe.main(["--m", "1,9,90,256", "--plot", str(tmp_path / "moe.svg")])
    out = capsys.readouterr().out
    assert "PREDICTED" in out and out.count("predicted ") >= 4 and "nothing was run" in out
    assert "published" in out and (tmp_path / "moe.svg").read_text().endswith("</svg>\n")


def test_resume_takes_only_rows_of_the_same_case(tmp_path):
    path = tmp_path / "rows.jsonl"
    same, other = {"shape": "a", "tp": 1, "M": 9, "ms": 1}, {"shape": "b", "tp": 1, "M": 9}
    peer = {"shape": "a", "tp": 1, "M": 1, "peer": "x"}
    path.write_text("".join(json.dumps(r) + "\n" for r in (same, other, peer)))
    assert bench_moe.finished_rows(path, {"shape": "a", "tp": 1}) == {9: same}
    assert bench_moe.finished_rows(None, {}) == {}


def test_shape_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setattr(bench_moe, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="--tp 3"):
        bench_moe.main(["--tp", "3", "--m", "1"])
