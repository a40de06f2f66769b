"""A plan under way: handed over, and later waited for. Between the two the host may do what needs no result."""

from __future__ import annotations

from typing import Generic, TypeVar

from runtime.executor import Pending
from runtime.stats import EngineStats

R = TypeVar("R")


class Flight(Generic[R]):
    """From its launch until its results are there a plan keeps the device busy, and `stats` knows."""

    def __init__(self, pending: Pending[R], stats: EngineStats) -> None:
        self._pending, self._stats = pending, stats
        stats.take_off()

    def land(self) -> R:
        """Waits for the results. Where they were there before anybody asked, the device has idled, nobody knows how long."""
        late = self._pending.done()
        self._pending.wait()
        self._stats.land(late)
        return self._pending.read()
