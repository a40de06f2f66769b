"""Calls that may take too long: run in a thread beside the caller's, given up after a wall time."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Late(TimeoutError):
    """A call took longer than it may; it goes on in a thread that nobody listens to any more."""


class Bounded(Generic[T]):
    """Runs calls one after another, each for at most `limit_s` seconds of wall time.

    What a call left behind touches must never be used again. It can be given up only if it lets the interpreter go
    meanwhile, as llguidance does while it computes a mask. A batch costs one change of threads and back, about 50 us.
    One caller at a time.
    """

    def __init__(self, limit_s: float, name: str = "bounded") -> None:
        self.limit_s = limit_s
        self.left_behind = 0  # threads that were given up since the start
        self._name = name
        self._work: queue.SimpleQueue[_Batch | None] | None = None

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """What each call returned or raised, Late for one that was given up, in order."""
        results: list[T | BaseException] = []
        while len(results) < len(calls):
            batch = _Batch(calls[len(results) :])
            self._thread().put(batch)
            while not batch.finished.wait(max(0.0, batch.began_s + self.limit_s - time.monotonic())):
                if batch.give_up(self.limit_s):
                    self._work = None  # its thread is busy: the rest goes to a new one
                    self.left_behind += 1
                    break
            results += batch.results
            if batch.given_up:
                results.append(Late(f"given up after {self.limit_s:g} s"))
        return results

    def _thread(self) -> queue.SimpleQueue[_Batch | None]:
        if self._work is None:
            work: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
            self._work = work
            threading.Thread(target=_serve, args=(work,), name=self._name, daemon=True).start()
            weakref.finalize(self, work.put, None)
        return self._work


class _Batch:
    """Calls on their way through one thread. `lock` decides whether the caller or the thread was first."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.results: list[Any] = []
        self.began_s = time.monotonic()  # of the call that runs
        self.finished = threading.Event()
        self.given_up = False
        self._lock = threading.Lock()

    def run(self) -> bool:
        """Whether the caller still listened at the end."""
        self.began_s = time.monotonic()
        for call in self.calls:
            try:
                result = call()
            except BaseException as error:  # a panic in Rust is no Exception
                result = error
            with self._lock:
                if self.given_up:
                    return False
                self.results.append(result)
                self.began_s = time.monotonic()
        self.finished.set()
        return True

    def give_up(self, limit_s: float) -> bool:
        """True if the call that runs now has had its time; from then on nothing is added to the results."""
        with self._lock:
            self.given_up = len(self.results) < len(self.calls) and time.monotonic() - self.began_s >= limit_s
            return self.given_up


def _serve(work: queue.SimpleQueue[_Batch | None]) -> None:
    while True:
        batch = work.get()
        if batch is None or not batch.run():
            return
