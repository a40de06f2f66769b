"""The plot's figures; drawing itself needs the extra `plot`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from runtime.hw import find_hardware
from runtime.planning import plan_buckets
from tools.plot import BUCKETS, main, read_sweetspot, shortened, stack
from tools.roofline import read_config


def test_parts_add_up_to_the_floor() -> None:
    config, _ = read_config("kimi-k26")
    steps = plan_buckets(config, 8, BUCKETS, 4096, find_hardware("h200"))
    parts = stack(steps)
    for i, step in enumerate(steps):
        assert sum(values[i] for values in parts.values()) == pytest.approx(step.floor_us / 1e3)
    assert parts["experts"][0] < parts["linear"][0], "one row reads eight experts and all of attention"
    assert parts["experts"][-1] < 1.1 * parts["experts"][BUCKETS.index(256)], "past a few hundred rows the experts are flat"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib (extra plot)")
def test_equal_runs_draw_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        assert main(["floor", "--config", "demo", "--tp", "1", "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_places_are_short_and_scales_stay() -> None:
    assert shortened('M 10.123456 -2.5 \nL 3.999999 460.8"/><g transform="translate(7.0625 0.015625) scale(0.015625)">') == (
        'M 10.12 -2.5\nL 4 460.8"/><g transform="translate(7.06 0.015625) scale(0.015625)">'
    )


def write_records(path: Path) -> Path:
    made = [
        {"curve": curve, "streams": streams, "policy": policy, "tok_s": rate * streams, "M": streams * rows, "simulated": True}
        for curve in ("h200-tp8", "flat")
        for streams in (1, 8)
        for policy, rows, rate in (
            ("plain", 1, 50),
            ("tree", 4, 90),
            ("tree", 8, 80),
            ("uniform", 4, 90),
            ("auto", 4.2, 95),
            ("oracle", 5, 150),
        )
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in made))
    return path


def test_records_are_read_by_curve_streams_and_policy(tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl")
    points = read_sweetspot(path, "flat")
    assert list(points) == [1, 8] and [r["M"] for r in points[8]["tree"]] == [32, 64]
    assert points[8]["auto"][0]["tok_s"] == 760
    with pytest.raises(ValueError, match=r"'h100'.*flat, h200-tp8"):
        read_sweetspot(path, "h100")
    with pytest.raises(SystemExit):
        main(["sweetspot", "--records", str(path), "--curve", "convex", "--out", str(tmp_path / "x.svg")])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib (extra plot)")
def test_the_sweet_spot_is_drawn_and_labelled(tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl")
    for name in ("a.svg", "b.svg"):
        assert main(["sweetspot", "--records", str(path), "--out", str(tmp_path / name)]) == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert "simulated, not measured" in drawn and "8 streams" in drawn
