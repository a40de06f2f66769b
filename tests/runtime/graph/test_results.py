"""Waiting for a launch: polls that yield, and what a launch says of itself."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from runtime.graph.driver import ListDriver
from runtime.graph.results import Launch, Results
from tests.blank_device import BlankDevice


def test_a_poll_yields_and_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a sleep of nothing takes the kernel's timer slack, and results are seen that much late."""
    results = Results(ListDriver(BlankDevice()), 1, {})
    launch, polls = Launch(results, 7, 5.0, "step of 1 row"), list[float]()

    def poll() -> None:
        polls.append(time.perf_counter())
        if len(polls) == 50:
            results._memory.host[:4].view(np.uint32)[0] = 7

    def sleep(seconds: float) -> None:
        raise AssertionError("a poll slept")

    monkeypatch.setattr(os, "sched_yield", poll)
    monkeypatch.setattr(time, "sleep", sleep)
    assert not launch.done()
    launch.wait()
    assert launch.done() and len(polls) == 50 and launch.us > 0
    launch.wait()
    assert len(polls) == 50, "what is there is not waited for"
