from __future__ import annotations

import dataclasses

import pytest

from runtime.cost import Cost
from runtime.hw import HARDWARE, Hardware, find_hardware
from runtime.ops import OPS

HW = Hardware("toy", read_bps=1e9, tensor_flops=1e12, memory_bytes=1e9, link_bps=1e9, link_us=1.0)


def test_costs_add_and_repeat() -> None:
    a, b = Cost(1.0, 2.0, 3.0), Cost(10.0, 20.0, 30.0)
    assert a + b == Cost(11.0, 22.0, 33.0)
    assert a * 3 == 3 * a == a + a + a
    assert sum([a, b], Cost()).bytes == 55.0


def test_floor_is_the_slower_of_reading_and_computing() -> None:
    reading, computing = Cost(1e6, 600.0, 400.0), Cost(1e9, 600.0, 400.0)
    assert reading.floor_us(HW) == pytest.approx(1.0) == reading.read_us(HW)
    assert computing.floor_us(HW) == pytest.approx(1000.0) == computing.compute_us(HW)


def test_costs_and_machines_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cost().flops = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        HW.name = "x"  # type: ignore[misc]


def test_every_machine_has_a_source_and_plausible_units() -> None:
    for name, hw in HARDWARE.items():
        assert hw.name == name and hw.source
        assert 1e10 < hw.read_bps < 1e14 and 1e11 < hw.tensor_flops < 1e16 and 1e9 < hw.memory_bytes < 1e12
        assert 5 < hw.tensor_flops / hw.read_bps < 1000, "flops a byte"


def test_a_bad_or_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="read_bps is 0"):
        dataclasses.replace(HW, read_bps=0)
    with pytest.raises(ValueError, match="link_us is -1"):
        dataclasses.replace(HW, link_us=-1)
    assert find_hardware("H200") is HARDWARE["h200"]
    with pytest.raises(ValueError, match="known: h200"):
        find_hardware("h2000")


def test_linear_cost_is_the_formula() -> None:
    cost = OPS["linear"].cost({"M": 4, "N": 2112, "K": 7168})
    assert cost == Cost(2 * 4 * 2112 * 7168, 2 * (2112 * 7168 + 4 * 7168), 2 * 4 * 2112)


# M -> microseconds on an H200 at 4.54 TB/s: the byte floor of one K2.6 expert layer on one GPU.
EXPERT_LAYER_US = {1: 43.6, 9: 362.0, 16: 599.0, 32: 1030.0, 64: 1550.0, 128: 1950.0, 512: 2095.0}


@pytest.mark.parametrize(("rows", "us"), EXPERT_LAYER_US.items())
def test_expert_layer_floor(rows: int, us: float) -> None:
    cost = OPS["moe_w4"].cost({"M": rows, "H": 7168, "F": 2048, "E": 384, "k": 8})
    assert cost.read_us(HARDWARE["h200"]) == pytest.approx(us, rel=0.02)


def test_distinct_experts_override_the_uniform_expectation() -> None:
    symbols = {"M": 64, "H": 7168, "F": 2048, "E": 384, "k": 8}
    cost = OPS["moe_w4"].cost
    assert cost({**symbols, "distinct": 8}).read_bytes < 0.04 * cost(symbols).read_bytes
    assert cost({**symbols, "distinct": 8}).flops == cost(symbols).flops
