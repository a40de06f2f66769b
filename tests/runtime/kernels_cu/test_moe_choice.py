"""Which configuration a bucket gets: tuned entries, nearest M, defaults, and the rules that refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.hw import find_hardware
from runtime.kernels_cu.moe_choice import candidates, choose_config, default_config, predict_us, read_tuned, tuned_key
from runtime.kernels_cu.moe_config import MAX_SMEM_BYTES, Config, Dims

K26 = (384, 7168, 2048, 8)
RESULTS = Path(__file__).parents[3] / "tools" / "results" / "moe_h200.jsonl"


def dims(m: int, tp: int = 1) -> Dims:
    return Dims(m, K26[0], K26[1], K26[2] // tp, K26[3])


def test_every_tuned_entry_is_legal_and_above_its_floor():
    entries = {key: entry for key, entry in read_tuned("h200").items() if key.startswith("moe_w4")}
    assert len(entries) >= 25
    for key, entry in entries.items():
        experts, hidden, width, top_k, m = (int(v) for v in re.fullmatch(r"moe_w4 E=(\d+) H=(\d+) F=(\d+) k=(\d+) M=(\d+)", key).groups())
        shape = Dims(m, experts, hidden, width, top_k)
        Config(**entry["config"]).check(shape)
        assert tuned_key(shape) == key and entry["us"] > entry["floor_us"] > 0 and len(entry["src"]) == 12


def test_choice_takes_the_nearest_larger_tuned_size():
    exact, why = choose_config(dims(64), "h200")
    assert "M=64" in why and exact == Config(**read_tuned("h200")[tuned_key(dims(64))]["config"])
    between, why = choose_config(dims(65), "h200")
    assert "M=90" in why and between == Config(**read_tuned("h200")[tuned_key(dims(90))]["config"])
    assert "M=8192" in choose_config(dims(20000), "h200")[1]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 9, 17, 100, 300, 3000])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_size_gets_a_legal_configuration(m, tp):
    for gpu, arch in (("h200", "sm_90a"), ("unknown", "sm_90a"), ("unknown", "sm_120a"), ("unknown", "sm_80")):
        config, _ = choose_config(dims(m, tp), gpu, arch)
        config.check(dims(m, tp), arch)
        assert config.smem_bytes() <= MAX_SMEM_BYTES[arch]


def test_default_serves_tiny_models():
    for shape in (Dims(1, 8, 128, 64, 2), Dims(5, 16, 512, 128, 4), Dims(3, 4, 64, 32, 1)):
        default_config(shape, "sm_89").check(shape, "sm_89")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(rows13=3), "rows13 = 3"),
        (Config(octets=5), "5 octets"),
        (Config(wgmma=True, rows13=2), "wgmma needs"),
        (Config(stages=12), "bytes of shared memory"),
        (Config(splits=7), "splits = 7"),
        (Config(claim=3), "claim = 3"),
        (Config(token_rows=4), "token_rows = 4"),
        (Config(wide=True), "wide is for"),
        (Config(merged=True), "merged is for"),
        (Config(batch=2), "batch = 2"),
        (Config(fewest=2), "fewest = 2"),
        (Config(fragments=2, rows13=2, rows2=2), "2 fragments"),
    ],
)
def test_a_broken_rule_is_named(config, words):
    with pytest.raises(ValueError, match=words):
        config.check(dims(64))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Dims(1, 8, 100, 64, 2), "H = 100"),
        (Dims(1, 8, 128, 40, 2), "F = 40"),
        (Dims(1, 8, 128, 64, 9), "top_k = 9"),
        (Dims(1, 2000, 128, 64, 2), "E = 2000"),
        (Dims(0, 8, 128, 64, 2), "M = 0"),
    ],
)
def test_a_shape_out_of_reach_is_named(shape, words):
    with pytest.raises(ValueError, match=words):
        shape.check()


def test_candidates_are_legal_and_distinct_and_ranked_above_the_floor():
    hw = find_hardware("h200")
    for m in (1, 9, 90, 512, 4096):
        found = list(candidates(dims(m)))
        assert len(found) == len(set(found)) > 3
        for config in found:
            config.check(dims(m))
            assert predict_us(dims(m), config, hw) > dims(m).expert_bytes * 8 / hw.read_bps * 1e6


def test_recorded_rows_carry_their_provenance():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    ours, peers = [r for r in rows if "peer" not in r], [r for r in rows if "peer" in r]
    assert ours and peers and all(r["source"] for r in peers)
    for r in ours:
        assert r["error"] < 8e-3 and r["commit"] and r["driver"] and r["cmd"].startswith("python tools/bench_moe.py")
        assert abs(r["share"] - r["gb"] / r["ms"] / r["read_tb_s"]) < 2e-3
