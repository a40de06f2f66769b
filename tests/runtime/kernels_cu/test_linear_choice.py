"""Which kernel a product of few rows gets, by record."""

from __future__ import annotations

import pytest

from runtime.kernels_cu import linear_choice
from runtime.kernels_cu.linear_choice import library_is_faster, tuned_key
from runtime.kernels_cu.linear_skinny import Dims

TIMES = {"us": {"1": 10.0, "8": 12.0, "16": 20.0}, "library_us": {"1": 11.0, "8": 11.5, "16": 12.0}}


@pytest.fixture
def record(monkeypatch):
    def put(times: dict) -> None:
        monkeypatch.setattr(linear_choice, "read_tuned", lambda gpu: {tuned_key(Dims.plain(1, 64, 64)): times})

    return put


def test_the_next_measured_m_decides(record):
    record(TIMES)
    assert [m for m in range(1, 17) if library_is_faster(Dims.plain(m, 64, 64), "h200")] == list(range(2, 17))


def test_without_a_record_of_both_the_kernel_has_its_turn(record):
    record({"us": TIMES["us"]})
    assert not library_is_faster(Dims.plain(8, 64, 64), "h200")
    record(TIMES)
    assert not library_is_faster(Dims.plain(8, 128, 64), "h200")


def test_the_h200_has_measured_the_head_and_the_router():
    assert library_is_faster(Dims.plain(1, 163_840, 7168), "h200")
    assert not library_is_faster(Dims.plain(16, 384, 7168), "h200")
