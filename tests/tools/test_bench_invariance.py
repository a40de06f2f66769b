"""tools/bench_invariance.py over a worker on the CPU shim: bits compared, times asked for, records written."""

from __future__ import annotations

import json

import numpy as np
import pytest

from runtime import loading
from runtime.graph.driver import ListDriver
from runtime.types import SamplingParams
from tests.runtime.graph.worlds import tiny_model
from tests.shim_device import ShimDevice
from tools import bench_invariance

OPTIONS = ["--max-model-len", "64", "--num-pages", "12", "--ctx", "5", "--streams", "2"]


class Timed(ListDriver):
    """Says that a launch takes as many microseconds as it has kernels."""

    def time_us(self, graph, repeats):
        return float(graph.nodes["kernel"])


@pytest.fixture
def small(shim, monkeypatch):
    """Buckets to 12, a context of 11, prompts of three tokens."""
    for name, value in {"SIZES": (1, 8, 12), "CTX": 11, "PAGES_EACH": 2, "find_gpu": lambda: (True, "a shim")}.items():
        monkeypatch.setattr(bench_invariance, name, value)
    monkeypatch.setattr(bench_invariance, "provenance", lambda commit: {"commit": commit, "gpu": "shim"})
    monkeypatch.setattr(bench_invariance, "prompts_of", lambda path, tokenizer, count: [[5 + i, 9, 300 - i] for i in range(count)])
    monkeypatch.setattr(bench_invariance, "TEXTS", {"greedy": SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)})
    made = loading.make_gpu_executor
    monkeypatch.setattr(loading, "make_gpu_executor", lambda *args: made(*args, driver=Timed(ShimDevice(shim))))


@pytest.mark.usefixtures("small")
def test_bits_costs_and_texts_are_recorded(tmp_path, capsys):
    where = tmp_path / "rows.jsonl"
    assert bench_invariance.main([str(tiny_model(tmp_path)), *OPTIONS, "--prompts", "2", "--commit", "abc", "--json", str(where)]) == 0
    rows = [json.loads(line) for line in where.read_text().splitlines()]
    buckets = [row for row in rows if row["kind"] == "bucket"]
    assert [row["M"] for row in buckets] == [1, 8, 12] and all(row["equal"] == row["compared"] > 1 for row in buckets)
    assert all(row["us"] > 40 and abs(row["cost"]) < 0.5 and row["commit"] == "abc" for row in buckets)
    assert all(row["tree_us"] == row["us"] and row["tree_cost"] == row["cost"] for row in buckets), "a launch is a launch to this clock"
    texts = [row for row in rows if row["kind"] == "texts"]
    assert [(row["sampling"], row["prompts"], row["different"], row["other_bits"]) for row in texts] == [("greedy", 2, 0, 0)]
    assert "0 of 2 texts differ" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_mutation_a_bit_that_differs_fails_the_run(tmp_path, monkeypatch, capsys):
    """One number of one row in one bucket, by its last bit."""
    exact = bench_invariance.row_bits

    def off(worker, rows, place, seed):
        found = exact(worker, rows, place, seed)
        if (rows, place) == (8, 7):
            found[3] = np.nextafter(found[3], np.float32(9))
        return found

    monkeypatch.setattr(bench_invariance, "row_bits", off)
    assert bench_invariance.main([str(tiny_model(tmp_path)), *OPTIONS, "--prompts", "0"]) == 1
    lines = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line.split()[0].isdigit()}
    assert lines["12"][0] == lines["12"][1] and int(lines["8"][0]) == int(lines["8"][1]) + bench_invariance.COMPANIES


@pytest.mark.parametrize(("token", "logp", "found"), [(7, -0.5, (0, 0)), (7, -0.5000001, (0, 1)), (8, -0.5, (1, 1))])
def test_mutation_a_text_that_differs_fails_the_run(monkeypatch, capsys, token, logp, found):
    """By a token, or by the last bits of a log-probability alone."""
    plain, drafted = ([[(3, -1.0)], [(5, -0.25), last]] for last in ((7, -0.5), (token, logp)))
    counts = {
        "prompts": 2,
        "different": bench_invariance.differing(plain, drafted, 1),
        "other_bits": bench_invariance.differing(plain, drafted, 2),
    }
    assert (counts["different"], counts["other_bits"]) == found
    monkeypatch.setattr(bench_invariance, "find_gpu", lambda: (True, "a shim"))
    monkeypatch.setattr(bench_invariance, "run", lambda args: ([], {"greedy": counts}))
    assert bench_invariance.main(["demo"]) == int(any(found))
    assert f"{found[0]} of 2 texts differ between draft trees and plain decoding, {found[1]} in the bits" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_claimed(monkeypatch, capsys):
    monkeypatch.setattr(bench_invariance, "find_gpu", lambda: (False, "CuPy sees no GPU"))
    assert bench_invariance.main(["demo"]) == 2
    assert "nothing was run" in capsys.readouterr().out
