"""bench_serve: its arithmetic on made-up samples, and one real run on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from model.tiny import make_tiny
from tools.bench_report import Cell, markdown_table, percentiles, read_records, record_of
from tools.bench_serve import blocks_of, main, measure, read_questions, speculation_for, verdict
from tools.bench_targets import Question, Sample

WHERE = {"cmd": "python x", "commit": "abc", "dirty": False, "date": "2026-01-02T00:00:00", "cpu": "c", "threads": 2}


def sample(tokens: int, text: str = "t", accepted: Sequence[int] = (), first_s: float = 0.5, last_s: float = 1.5) -> Sample:
    return Sample(tokens, text, first_s, last_s, list(accepted), [8] * len(accepted))


def cell(method: str, *blocks: tuple[list[Sample], float]) -> Cell:
    made = Cell(method, 0.0, 1)
    for samples, wall_s in blocks:
        made.add(samples, wall_s)
    return made


def test_figures_are_what_the_words_say() -> None:
    base = cell("none", ([sample(11)], 2.0), ([sample(9, "u")], 2.0))
    fast = cell("ddtree:8", ([sample(11, accepted=[3, 0, 1])], 1.0), ([sample(9, "v", accepted=[0, 2])], 0.5))
    assert base.tokens_per_s == 5.0
    assert fast.acceptance_length == 1 + 6 / 5
    assert fast.acceptance_by_depth() == [3 / 5, 2 / 5, 1 / 5]
    speedup = fast.speedup(base)
    assert speedup is not None
    assert speedup["total"] == pytest.approx((20 / 1.5) / 5.0)
    assert speedup["p50"] == pytest.approx((2 + 4) / 2)
    assert fast.same_text(base) == (1, 2)
    record = record_of(fast, base, WHERE)
    assert record["tpot_ms"]["p50"] == pytest.approx((1000 / 10 + 1000 / 8) / 2, abs=1e-3)
    assert record["nodes"] == 40
    assert set(record_of(base, base, WHERE)) == set(record)


def test_without_a_baseline_there_is_no_speedup() -> None:
    record = record_of(cell("server", ([sample(4)], 1.0)), None, WHERE)
    assert (record["speedup"], record["same_text"], record["acceptance_length"]) == (None, None, None)
    assert verdict([record])[1]


def test_a_difference_in_text_is_not_passed_over() -> None:
    base, other = cell("none", ([sample(4, "a")], 1.0)), cell("ddtree:8", ([sample(4, "b")], 1.0))
    records = [record_of(one, base, WHERE) for one in (base, other)]
    assert verdict(records) == ("NOT lossless: 1 of 1 answers differ from those without speculation", False)
    other.samples[0].text = "a"
    assert verdict([record_of(one, base, WHERE) for one in (base, other)])[1]
    other.samples[0].error = "broken"
    assert not verdict([record_of(other, base, WHERE)])[1]


def test_methods_take_turns() -> None:
    order: list[tuple[str, int]] = []

    class Target:
        summary = ""

        def __init__(self, name: str) -> None:
            self._name = name

        def run(self, questions: Sequence[Question], max_tokens: int, temperature: float) -> tuple[list[Sample], float]:
            order.append((self._name, questions[0].seed))
            return [sample(1) for _ in questions], 1.0

        def close(self) -> None: ...

    questions = [Question(str(i), i) for i in range(5)]
    *_, cells = measure({name: Target(name) for name in "abc"}, questions, 8, 0.0, 2)
    assert order == [("a", 0), ("b", 0), ("c", 0), ("b", 2), ("c", 2), ("a", 2), ("c", 4), ("a", 4), ("b", 4)]
    assert [len(block) for block in blocks_of(questions, 2)] == [2, 2, 1]
    assert all(len(one.samples) == 5 for one in cells.values())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("none", None),
        ("dflash:7", {"method": "dflash", "num_speculative_tokens": 7}),
        ("ddtree:16", {"method": "ddtree", "tree_budget": 16}),
        ("ddtree:auto", {"method": "ddtree", "tree_budget": "auto"}),
    ],
)
def test_method_names(name: str, config: dict[str, Any] | None) -> None:
    assert speculation_for(name) == config


@pytest.mark.parametrize("name", ["", "tree", "ddtree", "ddtree:", "none:3", "ddtree:x"])
def test_wrong_method_names(name: str) -> None:
    with pytest.raises(ValueError, match="--methods"):
        speculation_for(name)


def test_prompts_must_be_enough(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"q": "a", "a": "x"}, "b"]))
    assert [question.text for question in read_questions(path, 2)] == ["a", "b"]
    with pytest.raises(ValueError, match="holds 2 prompts"):
        read_questions(path, 3)


def test_results_of_another_kind_are_passed_over_and_broken_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record = record_of(cell("none", ([sample(4)], 1.0)), None, WHERE)
    path.write_text(json.dumps({"schema": "other/1"}) + "\n" + json.dumps(record) + "\n")
    assert read_records(path) == [record]
    del record["speedup"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="line 1: no speedup"):
        read_records(path)


def test_a_stall_moves_the_total_and_not_the_median() -> None:
    base = cell("none", *[([sample(10)], 1.0)] * 9, ([sample(10)], 100.0))
    fast = cell("ddtree:8", *[([sample(10)], 0.5)] * 10)
    speedup = fast.speedup(base)
    assert speedup is not None
    assert speedup["p50"] == 2.0
    assert speedup["total"] > 20


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}
    assert percentiles([0.001, 0.003]) == {"p50": 2.0, "p90": 2.8, "p99": 2.98}


@pytest.mark.parametrize("via", ["engine", "http"])
def test_a_real_run_is_lossless_and_leaves_records(tmp_path: Path, capsys: pytest.CaptureFixture[str], via: str) -> None:
    tiny, out = make_tiny(tmp_path / "tiny"), tmp_path / "r" / "out.jsonl"
    options = [str(tiny), "--prompts", "2", "--max-tokens", "8", "--methods", "none,dflash:3,ddtree:8", "--temperature", "0", "0.8"]
    assert main([*options, "--concurrency", "1", "2", "--out", str(out), "--markdown", "--via", via]) == 0
    records = read_records(out)
    assert [record["case"] for record in records[:3]] == ["none T=0 c=1", "dflash:3 T=0 c=1", "ddtree:8 T=0 c=1"]
    assert len(records) == 3 * 2 * 2
    assert all(record["same_text"] == [2, 2] and record["failed"] == 0 for record in records)
    assert all(record["tokens"] > 0 and record["steps"] > 0 for record in records if record["method"] != "none")
    for key in ("cmd", "commit", "date", "cpu", "threads", "model", "max_tokens", "summary"):
        assert records[0][key] not in (None, ""), key
    shown = capsys.readouterr()
    assert markdown_table(records) in shown.out
    assert "lossless: all 16 speculative answers" in shown.err
    assert main(["--read", str(out), "--markdown"]) == 0
    assert markdown_table(records) in capsys.readouterr().out


def test_what_is_not_usable_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--methods", "x"], ["--prompts", "0"], ["--prompts", "100000"], ["/nowhere"], ["--base-url", "http://127.0.0.1:9"]):
        assert main([*options, "--out", str(tmp_path / "o")]) == 2
        assert "bench_serve: error:" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
