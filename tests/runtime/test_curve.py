"""Cost curves: steps between edges, what is learned, what is stored, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runtime.curve import CostCurve, CurveKey, curve_file
from runtime.learned import EMA_STEPS, CurveError, Learned

KEY = CurveKey("cpu", "demo", 1)


def curve(**options: object) -> CostCurve:
    return CostCurve((1, 8, 64), (0.001, 0.002, 0.010), **{"key": KEY, **options})  # type: ignore[arg-type]


def test_padding_is_paid_up_to_the_edge() -> None:
    rows = np.array([0, 1, 2, 8, 9, 64])
    assert curve().step(rows).tolist() == [0.001, 0.001, 0.002, 0.002, 0.010, 0.010]
    assert curve().step(128) == pytest.approx(0.020), "above the last edge a step takes two launches"
    interpolated = np.interp(rows, (1, 8, 64), (0.001, 0.002, 0.010))
    assert not np.allclose(interpolated, curve().step(rows)), "mutation: interpolating between edges"


def test_a_cycle_is_host_draft_and_step() -> None:
    held = curve(streams=(4, 16), draft_s=(0.5, 0.75), overhead_s=0.25)
    assert held.step_seconds(8, 0) == pytest.approx(0.252)
    assert held.step_seconds(8, 4) == pytest.approx(0.752)
    assert held.step_seconds(8, 5) == pytest.approx(1.002)


def test_measuring_replaces_the_prior_and_scales_its_neighbours() -> None:
    held = curve()
    held.observe_step(60, 0, 0.020)
    assert held.step(np.array([1, 8, 64])).tolist() == pytest.approx([0.002, 0.004, 0.020]), "one ratio for the whole prior"
    held.observe_step(1, 0, 0.001)
    assert held.step(64) == pytest.approx(0.020) and held.step(1) == pytest.approx(0.001)
    assert 0.002 < held.step(8) < 0.004, "between a ratio of 1 and one of 2"


def test_a_constant_prior_is_interpolated() -> None:
    held = Learned((1, 11, 21), (1.0, 1.0, 1.0))
    held.observe(1, 2.0)
    held.observe(21, 6.0)
    assert held.value.tolist() == pytest.approx([2.0, 4.0, 6.0])


def test_the_host_is_known_by_streams_nodes_and_draft(tmp_path: Path) -> None:
    held = curve(overhead_s=0.25)
    assert held.host.at(4, np.array([0, 9]), True).tolist() == [0.25, 0.25]
    for nodes, seconds in ((4, 0.004), (64, 0.010)):
        held.host.observe(4, nodes, True, seconds)
    assert held.host.at(3, np.array([4, 34, 64, 500]), True).tolist()[::2] == pytest.approx([0.004, 0.010])
    assert 0.006 < held.host.at(3, 34, True) < 0.008 and held.host.at(3, 500, True) > 0.010
    assert 1.5 < held.host.at(16, 4, True) / held.host.at(4, 4, True) < 3.0, "many streams from few, by shape"
    assert 0.3 < held.host.at(4, 0, False) / held.host.at(4, 0, True) < 0.5, "and plain steps from drafted ones"
    held.host.observe(4, 0, False, 0.002)
    assert held.host.at(4, 0, False) == pytest.approx(0.002)
    held.save(tmp_path / "c.json")
    again = CostCurve.load(tmp_path / "c.json")
    assert again.host.at(3, 34, True) == pytest.approx(held.host.at(3, 34, True), abs=1e-8)


def test_rows_of_a_bucket_that_are_dead_cost_what_was_seen(tmp_path: Path) -> None:
    """10 rows in a bucket of 16: where dead rows cost nothing they lie on the line between 8 and 16."""
    free, dear = (CostCurve((8, 16), (4.0, 8.0), key=KEY) for _ in range(2))
    for held, seconds in ((free, 5.0), (dear, 8.0)):
        for rows in (8, 16):
            held.observe_step(rows, 0, held.step(rows))
        for _ in range(40):
            held.observe_step(10, 0, seconds, bucket=16)
    assert free.full < 0.1 and free.step(10) == pytest.approx(5.0, abs=0.3) and free.step_seconds(10, 0) == pytest.approx(free.step(10))
    assert dear.full > 0.95 and dear.step(10) == pytest.approx(8.0, abs=0.2), "mutation: as if padding were free"
    assert free.step(np.array([8, 16])).tolist() == [4.0, 8.0] == dear.step(np.array([8, 16])).tolist()
    free.save(tmp_path / "c.json")
    assert CostCurve.load(tmp_path / "c.json").step(10) == pytest.approx(free.step(10), abs=1e-3)


def test_a_slow_measurement_is_corrected_by_larger_steps() -> None:
    held = Learned((1, 8, 16, 24), (1.0, 1.0, 1.0, 1.0))
    for edge, seconds, times in ((1, 1.0, 9), (8, 9.0, 1), (16, 3.0, 4), (24, 5.0, 1)):
        for _ in range(times):
            held.observe(edge, seconds)
    assert held.value.tolist() == pytest.approx([1.0, 4.2, 4.2, 5.0]), "9 once and 3 four times are 4.2 together"
    for _ in range(60):
        held.observe(16, 3.0)
    assert held.value[1] == held.value[2] == pytest.approx(3.0, abs=0.15)


def test_means_move_and_a_pause_counts_little() -> None:
    held = Learned((4,), (9.0,))
    for _ in range(3 * EMA_STEPS):
        held.observe(3, 1.0)
    assert held.value[0] == pytest.approx(1.0)
    held.observe(3, 500.0)
    assert held.measured[0] == pytest.approx(1.0 + 1.0 / EMA_STEPS), "as if it had taken twice the mean"
    for _ in range(20 * EMA_STEPS):
        held.observe(3, 5.0)
    assert held.value[0] == pytest.approx(5.0, rel=1e-3), "a lasting change is followed"
    before = held.value.copy()
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        held.observe(3, bad)
    held.observe(5, 100.0)  # no edge holds it
    assert (held.value == before).all()


def test_contexts_are_kept_apart() -> None:
    held = curve(contexts=(1000, 4000, 1 << 40))
    held.observe_step(8, 500, 0.004)
    assert held.step(8, 999_999) == pytest.approx(0.004), "nearest measured context"
    held.observe_step(8, 2000, 0.008)
    assert [float(held.step(8, ctx)) for ctx in (0, 1000, 1001, 4000, 5000)] == pytest.approx([0.004, 0.004, 0.008, 0.008, 0.008])


def test_a_curve_comes_back_from_its_file(tmp_path: Path) -> None:
    held = curve(streams=(4, 16), draft_s=(0.5, 0.75), overhead_s=0.25, contexts=(1000, 2000), note="by hand")
    held.observe_step(8, 1500, 0.005)
    path = curve_file(tmp_path / "new", KEY)
    held.save(path)
    back = CostCurve.load(path, KEY)
    assert back.to_json() == held.to_json() and back.note == "by hand"
    assert [p.name for p in path.parent.iterdir()] == ["cpu-demo-tp1.json"]
    assert float(back.step(8, 1500)) == pytest.approx(0.005)


def test_keys_name_files_without_separators() -> None:
    path = curve_file(Path("x"), CurveKey("NVIDIA H200", "../kimi/k2", 8))
    assert path.parent == Path("x") and path.name == "NVIDIA_H200-.._kimi_k2-tp8.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "h200"}, ["gpu", "'h200'", "'cpu'"]),
        ({"tp": 8}, ["tp", "8", "1"]),
        ({"format": 9}, ["format 1"]),
        ({"buckets": [8, 4, 1]}, ["rising"]),
        ({"step_ms": [[1.0, float("nan"), 1.0]]}, ["finite"]),
        ({"overhead_ms": -1}, ["overhead"]),
        ({"draft_ms": None}, ["delete it"]),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_by_name(tmp_path: Path, change: dict[str, object], words: list[str]) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**curve().to_json(), **change}))
    with pytest.raises(CurveError) as caught:
        CostCurve.load(path, KEY)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(CurveError, match="delete it to measure again"):
            CostCurve.load(tmp_path / "c.json")
