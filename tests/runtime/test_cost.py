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


KIMI = {"A": 64, "L": 512, "R": 64, "N": 128, "U": 128}
# A chunk of 1,024 rows behind 8,192 keys, and beside it a tree of 9 rows behind 100 whose rows see 105 keys each.
CHUNK = {"rows": 1024, "keys": 9216, "row_keys": 1024 * 8192 + 1024 * 1025 / 2}
TREE = {"rows": 9, "keys": 109, "row_keys": 9 * 105.0}


def costs_of(*taken: dict[str, float]) -> dict[str, Cost]:
    """Each op of attention in a step of both, where chunk_attention takes these."""
    known = {f"chunk_{name}": sum((one[name] for one in taken), 0.0) for name in CHUNK}
    known |= {"M": 1033, "B": 2, "keys": 9216 + 109, "row_keys": CHUNK["row_keys"] + TREE["row_keys"]}
    return {op: OPS[op].cost(KIMI | known) for op in ("mla_query", "tree_mla", "mla_value", "chunk_attention")}


def check_a_chunk_and_a_tree(found: dict[str, Cost]) -> None:
    """By hand, in numbers of two bytes: w_uk and w_uv have 64 x 512 x 128 = 4,194,304 each, a row's query 64 x 192 = 12,288."""
    want = {
        "chunk_attention": Cost(  # 9,216 keys expanded for every head, then 192 + 128 products a key that a row sees
            128 * (9216 * 512 * 256 + 8_913_408 * 320), 2 * (9216 * 576 + 8_388_608 + 1024 * 12_288), 2 * 1024 * 8192
        ),
        "mla_query": Cost(2 * 9 * 4_194_304, 2 * (4_194_304 + 9 * 12_288), 2 * 9 * 64 * 576),
        "tree_mla": Cost(128 * 945 * (576 + 512), 2 * (109 * 576 + 9 * 64 * 576), 2 * 9 * 64 * 512),
        "mla_value": Cost(2 * 9 * 4_194_304, 2 * (4_194_304 + 9 * 64 * 512), 2 * 9 * 8192),
    }
    assert found == want


def test_a_chunk_is_priced_unabsorbed_and_the_rest_absorbed() -> None:
    found = costs_of(CHUNK)
    check_a_chunk_and_a_tree(found)
    nothing = costs_of()
    assert nothing["chunk_attention"] == Cost() and nothing["tree_mla"].flops == 128 * (8_913_408 + 945) * 1088
    assert nothing["tree_mla"].flops > 2.2 * found["chunk_attention"].flops, "1.24 against 0.52 Tflop"
    all_taken = costs_of(CHUNK, TREE)
    assert all(all_taken[op] == Cost() for op in ("mla_query", "tree_mla", "mla_value")), "weights are not read for no row"


def test_mutation_another_pricing_shows() -> None:
    for wrong in (costs_of(), costs_of(CHUNK, TREE), costs_of(TREE), costs_of(CHUNK) | {"mla_query": costs_of()["mla_query"]}):
        with pytest.raises(AssertionError):
            check_a_chunk_and_a_tree(wrong)
