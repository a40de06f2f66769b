"""The benchmark of a prompt's chunk without a GPU: cases, predictions."""

from __future__ import annotations

import pytest

from tools.bench_prefill import Case, main, parse_case


def test_predictions_name_every_case(capsys):
    main(["--predict", "--cases", "64x1024x32768,8x256x0"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PREDICTED") and len(lines) == 4
    heads, rows, ctx, absorbed, us, *_ = map(float, lines[2].split())
    assert (heads, rows, ctx) == (64, 1024, 32768) and absorbed > 2 * us


def test_cases_are_checked():
    assert parse_case("64x1024x0") == Case(64, 1024, 0)
    for wrong in ("64x1024", "64x170x0", "0x1024x0"):
        with pytest.raises(SystemExit, match="heads x rows x context"):
            parse_case(wrong)
