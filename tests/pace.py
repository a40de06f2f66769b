"""The time of a call in units of another one of its kind, taken in turn: what a slow or a busy processor does, it does to both."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

Call = Callable[[], object]


def ratio(call: Call, reference: Call, clock: Callable[[], float] = time.thread_time, rounds: int = 5, each: int = 9) -> float:
    """Median of `rounds` of: the quickest `call` of `each` ÷ the quickest `reference`; by this thread's time on a processor."""
    found = []
    for _ in range(rounds):
        took: tuple[list[float], list[float]] = ([], [])
        for _ in range(each):
            for one, times in zip((call, reference), took, strict=True):
                start = clock()
                one()
                times.append(clock() - start)
        found.append(min(took[0]) / min(took[1]))
    return median(found)


def sums(x: np.ndarray) -> None:
    """Four passes over x, one addition after the other: no vector unit, no library, no threads."""
    for _ in range(4):
        np.cumsum(x, axis=-1)
