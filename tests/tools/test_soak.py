"""The soak: a short one is clean, and what it looks for is found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from model.tiny import make_tiny
from server.client import ApiClient
from tools.soak import Sample, Tally, faults, growth_of, main
from tools.soak_traffic import KINDS, Kind, Wrong


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("soak") / "tiny"))


def test_a_short_soak_is_clean(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [tiny, "--num-pages", "300", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    code = main(["--minutes", "0.1", "--clients", "4", "--sample-every", "1", "--json", str(tmp_path / "r.jsonl"), "--", *options])
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert code == 0 and record["faults"] == [], capsys.readouterr()
    assert record["wrong"] == 0 and record["requests"] > 10 and 6 <= record["duration_s"] < 60
    assert (record["pages_held_at_end"], record["open_at_end"]) == (0, 0) and record["steps"] > 0
    assert set(record["by_kind"]) <= set(KINDS) and sum(record["by_kind"].values()) == record["requests"]


def steady(count: int = 12) -> list[Sample]:
    return [Sample(float(i), 300.0 + (i % 3), 20, 9, 5.0, 3.0, 10.0 * i) for i in range(count)]


END = Sample(12.0, 301.0, 20, 9, 0.0, 0.0, 120.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"open": 2.0}, "2 requests are still open"),
        ({"pages": 7.0}, "7 cache pages are still held"),
        ({"files": 30}, "30 open files, 20 at the start"),
    ],
)
def test_what_is_left_behind_is_found(change: dict[str, float], said: str | None) -> None:
    found = faults(steady(), dataclasses.replace(END, **change), Tally(), 20.0)
    assert found == ([] if said is None else [said])


def test_growth_is_found_and_the_warm_up_is_not() -> None:
    leaking = [dataclasses.replace(s, rss_mib=300.0 + 4 * i) for i, s in enumerate(steady())]
    assert growth_of(leaking) == 4 * (11 - 5)
    assert "memory grew by 24.0 MiB" in faults(leaking, END, Tally(), 20.0)[0] and not faults(leaking, END, Tally(), 25.0)
    warming = [dataclasses.replace(s, rss_mib=min(300.0 + 40 * i, 420.0)) for i, s in enumerate(steady())]
    assert faults(warming, END, Tally(), 20.0) == []


def test_a_wrong_answer_is_a_fault(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: a kind whose answer is never what it wants."""

    def wrong(client: ApiClient, model: str, rng: object) -> None:
        client.get("/health")
        raise Wrong("not what was wanted")

    monkeypatch.setitem(KINDS, "looks", Kind(wrong, 1000.0))
    monkeypatch.setattr("tools.soak.Soak.warm_up", lambda self: None)
    options = ["--", tiny, "--num-pages", "300"]
    assert main(["--minutes", "0.03", "--clients", "2", "--sample-every", "1", "--json", str(tmp_path / "r.jsonl"), *options]) == 1
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert record["wrong"] > 0 and "looks: not what was wanted" in record["faults"][0]
