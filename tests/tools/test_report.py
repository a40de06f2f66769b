"""The README's tables are its records'."""

from __future__ import annotations

import pytest

from tools.report import BLOCKS, README, render


def test_tables_agree_with_the_records() -> None:
    text = README.read_text(encoding="utf-8")
    assert render(text) == text, "run python tools/report.py"


def test_a_changed_figure_is_noticed() -> None:
    text = README.read_text(encoding="utf-8")
    for name in BLOCKS:
        start = text.index(f"<!-- {name} -->")
        digit = next(i for i in range(start, len(text)) if text[i].isdigit())
        changed = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
        assert render(changed) == text != changed


def test_missing_marks_are_named() -> None:
    with pytest.raises(ValueError, match="bench_serve"):
        render("# nothing here\n")
