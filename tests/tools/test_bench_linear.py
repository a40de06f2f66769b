"""The products' benchmark without a GPU: the shapes are the model's, a tuned entry comes first, predictions say what they are."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from runtime.hw import HARDWARE
from runtime.kernels_cu import linear_choice
from runtime.kernels_cu.linear_choice import choose_config, source_digest, tuned_key
from runtime.kernels_cu.linear_skinny import Config, Dims, default_config
from runtime.ops import OPS
from runtime.shape_model import walk_step
from tools import bench_linear
from tools.bench_linear import kimi_shapes
from tools.roofline import read_config


@pytest.mark.parametrize("tp", [1, 8])
def test_every_product_of_the_model_is_timed(tp):
    """And at the cost that the vocabulary states."""
    config, _ = read_config("kimi-k26")
    shapes = [s for s in kimi_shapes() if s.tp == tp or s.name in ("qkv_a", "router")]
    known = {(s.N, s.K, s.heads, s.float_out): s for s in shapes}
    for call, _ in walk_step(config, tp).ops:
        s = dict(call.symbols)
        if call.op in ("linear", "linear_f32"):
            shape = known[s["N"], s["K"], 1, call.op == "linear_f32"]
            want = OPS[call.op].cost({**s, "M": 9})
            assert (want.flops, want.bytes) == (shape.cost(9).flops, shape.cost(9).bytes)
        elif call.op == "route":
            assert (s["E"], s["H"], 1, True) in known
        elif call.op == "mla_query":
            assert (s["L"], s["N"], s["A"], False) in known
        elif call.op == "mla_value":
            assert (s["U"], s["L"], s["A"], False) in known


def test_a_tuned_entry_comes_first_and_is_one_for_all_rows(monkeypatch):
    dims, hw = Dims.plain(1, 2112, 7168), HARDWARE["h200"]
    assert choose_config(dims, "no such card") == (default_config(dims, hw), "default")
    tuned = Config(16, 2, 2, 2, 8)
    entry = {"config": asdict(tuned), "us": {"16": 9.0}, "src": source_digest()}
    monkeypatch.setattr(linear_choice, "read_tuned", lambda gpu: {tuned_key(dims): entry} if gpu == "card" else {})
    for m in (1, 8, 9, 16):
        assert choose_config(replace(dims, M=m), "card") == (replace(tuned, columns=8 if m <= 8 else 16), "tuned/card.json")
    assert choose_config(replace(dims, N=4096), "card")[1] == "default"
    entry["src"] = "another"
    assert choose_config(dims, "card")[1] == "tuned/card.json, measured on another version of the kernel"
    entry["config"]["splits"] = 999
    assert choose_config(dims, "card")[1] == "default"


def test_without_a_gpu_it_predicts_and_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_linear, "has_gpu", lambda: False)
    path = tmp_path / "rows.jsonl"
    bench_linear.main(["--shapes", "qkv_a,head", "--m", "1,16,64", "--json", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert "PREDICTED" in lines[0] and "nothing was run" in lines[0]
    timed = [tuple(line.split()[i] for i in (0, 5, 6)) for line in lines[2:]]
    each = [("1", "skinny"), ("1", "stream"), ("16", "skinny"), ("16", "stream"), ("64", "stream")]
    assert timed == [(name, *one) for name, times in (("qkv_a", 1), ("head", 2)) for one in each * times] and not path.exists()
    with pytest.raises(SystemExit):
        bench_linear.main(["--shapes", "nothing"])
    with pytest.raises(SystemExit):
        bench_linear.main(["--kernels", "nothing"])


def test_a_record_is_a_line(tmp_path):
    path = tmp_path / "results" / "rows.jsonl"
    for us in (1.0, 2.0):
        bench_linear.record(path, {"us": us})
    assert [json.loads(line)["us"] for line in path.read_text().splitlines()] == [1.0, 2.0]
