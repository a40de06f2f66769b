"""The mask bench measures answers that their schemas allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_masks


def test_a_record_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    bench_masks.main(["--vocab", "6000", "--repeats", "1", "--json", str(file)])
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [r["what"] for r in records] == list(bench_masks.SCHEMAS)
    assert all(r["vocab"] == 6000 and 0 < r["mask_p50_us"] <= r["mask_p99_us"] for r in records)
    assert "mask p50" in capsys.readouterr().out


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_masks.SCHEMAS, "any object", ({"type": "object"}, "[1]"))
    with pytest.raises(RuntimeError, match="none of its schema"):
        bench_masks.measure(None, 0)
