"""Variants of the attention kernel: each legal for its case, named apart, every trial among them; a run of them without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.kernels_cu.tree_mla_config import Config, default_config, served
from tools import mla_side_by_side
from tools.bench_mla import CASES, main, parse_case
from tools.mla_variants import ROUNDS, describe, trying, variants


@pytest.mark.parametrize("case", CASES)
def test_variants_are_legal_and_named_apart(case):
    dims = parse_case(case).dims
    found = variants(case, dims)
    for config in found:
        config.check(dims)
    assert len({describe(config) for config in found}) == len(found)
    assert replace(found[0], float_parts=True) == replace(served(default_config(dims), dims), float_parts=True)


def test_a_name_tells_trials_and_values():
    config = trying(served(Config(9, 17), parse_case("8x10x9x4096").dims), {"STAMPS": 2}, ahead=3, float_parts=False)
    assert describe(config) == "wgmma n72 s17 a3 b16 early_keys stamps=2"


@pytest.fixture
def dry(monkeypatch):
    """What a run would compile, time and note; its clock moves a second with each timing."""
    done, now = [], [0.0]

    class Run:
        def __init__(self, options, cases, builds):
            done.append(("cases", len(cases)))

        def time(self, case, variant):
            now[0] += 1.0
            done.append((case, describe(variant)))

        def note(self, case, variant):
            done.append(("noted", case))

        def summary(self):
            done.append(("summary", ""))

    class Builds(mla_side_by_side.Builds):
        def __init__(self, wanted, arch):
            self.begun = dict.fromkeys(wanted)

        def wait_all(self):
            done.append(("builds", len(self.begun)))

        def close(self):
            done.append(("closed", ""))

    monkeypatch.setattr(mla_side_by_side, "Builds", Builds)
    monkeypatch.setattr(mla_side_by_side, "SideBySide", Run)
    monkeypatch.setattr(mla_side_by_side.time, "perf_counter", lambda: now[0])
    return done


def test_a_run_times_every_variant_once_a_round(dry):
    main(["--variants", "--seconds", "1000"])
    timed = [line for line in dry if line[0] in CASES]
    every = [(case, describe(config)) for case in CASES for config in variants(case, parse_case(case).dims)]
    assert timed == ROUNDS * every
    assert {case for kind, case in dry if kind == "noted"} == set(CASES)
    assert dry[-2:] == [("summary", ""), ("closed", "")]


def test_a_run_ends_in_time(dry, capsys):
    main(["--variants", "--seconds", "7"])
    assert len([line for line in dry if line[0] in CASES]) == 8
    assert "are over before job 8: time" in capsys.readouterr().out


def test_a_fault_costs_one_job(dry, monkeypatch, capsys):
    """The third timing fails: the program is started anew with the fourth, and without it in later rounds."""

    def fails(self, case, variant):
        if len(dry) == 3:
            raise RuntimeError("a kernel trapped")
        dry.append((case, describe(variant)))

    def executed(path, words):
        dry.append(("again", words[-6:]))
        raise SystemExit

    monkeypatch.setattr(mla_side_by_side.SideBySide, "time", fails)
    monkeypatch.setattr(mla_side_by_side.os, "execv", executed)
    monkeypatch.setattr(mla_side_by_side.sys, "argv", ["tools/bench_mla.py", "--variants", "--seconds", "90", "--first", "0"])
    with pytest.raises(SystemExit):
        main(["--variants", "--seconds", "90"])
    assert dry[-1] == ("again", ["--without", "2", "--first", "3", "--seconds", "90"])
    assert "a kernel trapped" in capsys.readouterr().out
    dry.clear()
    monkeypatch.setattr(mla_side_by_side.SideBySide, "time", lambda self, case, variant: dry.append((case, describe(variant))))
    main(["--variants", "--seconds", "90", "--without", "2", "--first", "3"])
    every = [(case, describe(config)) for case in CASES for config in variants(case, parse_case(case).dims)]
    assert [line for line in dry if line[0] in CASES] == every[3:] + (ROUNDS - 1) * (every[:2] + every[3:])


def test_building_times_nothing(dry):
    main(["--variants", "--build", "--cases", "8x10x1x4096"])
    assert [kind for kind, _ in dry] == ["builds"]


def test_clocks_of_blocks_become_one_timeline():
    """Two blocks 1 us apart at 2 GHz, 3 us each; a merge's block."""
    raw = np.zeros((256, 32), np.int64)
    for block, begin in enumerate((5_000, 6_000)):
        raw[block, [0, 11, 12, 13]] = 100, 6_100, begin, begin + 3_000
    raw[200, 14:16] = 10_000, 11_500
    clock, *lines = mla_side_by_side.common(raw)
    assert clock.split() == ["clock,", "GHz", "2.00"]
    first_and_last = [(line.split()[-7], line.split()[-3]) for line in lines]
    assert first_and_last == [("0.00", "1.00"), ("3.00", "4.00"), ("5.00", "5.00"), ("6.50", "6.50")]
    assert mla_side_by_side.common(0 * raw) == []
