"""Waits that end: what never comes fails its test with a sentence, long before the whole run is given up."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

MOST_S = 120.0


def turns(waits: Callable[[], object], what: str, within_s: float = MOST_S) -> Iterator[None]:
    """Turns of a loop, as `while waits()` takes them; AssertionError once they have gone on that long."""
    end = time.monotonic() + within_s
    while waits():
        assert time.monotonic() < end, f"{what}: still so after {within_s:g} s"
        yield


def join(thread: threading.Thread, within_s: float = MOST_S) -> None:
    """The thread has ended when this returns."""
    thread.join(within_s)
    assert not thread.is_alive(), f"thread {thread.name} still runs after {within_s:g} s"


def line_with(popen: subprocess.Popen[str], pattern: str, within_s: float = MOST_S) -> tuple[re.Match[str], list[str]]:
    """The first match in a line that the process writes, and all lines up to it. AssertionError if it ends before, or has to be ended."""
    assert popen.stdout is not None
    late = threading.Timer(within_s, popen.kill)
    late.start()
    lines: list[str] = []
    try:
        for line in popen.stdout:
            lines.append(line.strip())
            found = re.search(pattern, line)
            if found:
                return found, lines
        raise AssertionError(f"the server ended with {popen.wait(10)}: {lines}")
    finally:
        late.cancel()
