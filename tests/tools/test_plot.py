"""The plot's figures; drawing itself needs the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from runtime.hw import find_hardware
from runtime.planning import plan_buckets
from tools.plot import BUCKETS, main, stack
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
