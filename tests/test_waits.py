"""Waits end, and say for what they waited."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

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
