"""Waiting for a launch: its number, a stream that fails, a deadline."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from runtime.graph.driver import ListDriver
from runtime.graph.results import Column, DeviceStuck, Results, result_columns, wanted_alternatives


class Broken(ListDriver):
    """A stream that has failed."""

    def __init__(self) -> None:
        super().__init__(None)
        self.says: str | None = None

    def failure(self) -> str | None:
        return self.says


def test_a_number_ends_the_wait():
    results = Results(ListDriver(None), 4, {"a": Column(1, "i32")})
    number = results._memory.host[:4].view(np.uint32)

    def later() -> None:
        time.sleep(0.02)
        number[0] = 7

    thread = threading.Thread(target=later)
    thread.start()
    results.wait(7, 5.0, "step")
    thread.join()
    results.wait(7, 0.0, "what is done already needs no time")


def test_a_failed_stream_ends_it_with_its_reason():
    driver = Broken()
    driver.says = "CUDA error 700, an illegal memory access was encountered"
    with pytest.raises(DeviceStuck, match=r"step of 3 rows: launch 5 was not finished, the last that was is 0: CUDA error 700"):
        Results(driver, 4, {}).wait(5, 60.0, "step of 3 rows")


def test_a_deadline_ends_it():
    with pytest.raises(DeviceStuck, match=r"launch 5 .* nothing for 0.02 s"):
        Results(Broken(), 4, {}).wait(5, 0.02, "step")


def test_columns_lie_apart_and_are_copied():
    results = Results(ListDriver(None), 5, {"a": Column(1, "i32"), "b": Column(3, "f32", asked=True), "none": Column(0, "f32")})
    memory = results._memory.host
    memory[256:276].view(np.int32)[:] = np.arange(5)
    memory[512 : 512 + 60].view(np.float32)[:] = np.arange(15)
    first = results.read("a", 4)
    memory[256:276] = 0
    np.testing.assert_array_equal(first, [0, 1, 2, 3])
    np.testing.assert_array_equal(results.read("b", 2), [[0, 1, 2], [3, 4, 5]])
    assert "none" not in results.columns and set(result_columns(0)) == set(result_columns(20))


def test_alternatives_are_the_most_that_a_sequence_wants():
    assert [wanted_alternatives(np.array(a, np.int32)) for a in ([], [-1, -1], [0], [2, -1, 5])] == [0, 0, 0, 5]
