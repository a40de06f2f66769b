"""Waits end, and say for what they waited."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.forks import on_ranks
from tests.waits import join, line_with, turns


def test_turns_go_on_while_they_are_wanted_and_no_longer_than_they_may() -> None:
    left = [1, 2, 3]
    for _ in turns(lambda: left, "numbers"):
        left.pop()
    assert not left
    with pytest.raises(AssertionError, match=r"what never comes: still so after 0\.05 s"):
        for _ in turns(lambda: True, "what never comes", 0.05):
            pass


def test_a_thread_that_stays_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(30,), name="stays")
    thread.start()
    with pytest.raises(AssertionError, match=r"thread stays still runs after 0\.05 s"):
        join(thread, 0.05)
    stop.set()
    join(thread)


def test_a_line_is_waited_for_but_not_for_ever() -> None:
    def start(program: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    found, lines = line_with(start("print('a'); print('at 7')"), r"at (\d)")
    assert found[1] == "7" and lines == ["a", "at 7"]
    with pytest.raises(AssertionError, match=r"ended with 3: \['a'\]"):
        line_with(start("print('a'); raise SystemExit(3)"), "at")
    with pytest.raises(AssertionError, match=r"ended with -9: \[\]"):
        line_with(start("import time; time.sleep(60)"), "at", 0.2)


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 has not answered, its process has exit code 3"):
        on_ranks(2, lambda rank: os._exit(3) if rank else rank, 300.0)
    assert time.monotonic() - began < 100
    with pytest.raises(AssertionError, match="rank 0 has not answered, its process has exit code None"):
        on_ranks(1, lambda rank: time.sleep(60), 0.1)
