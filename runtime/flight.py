"""A plan under way: handed over, and later waited for. Between the two the host may do what needs no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.executor import Pending
from runtime.stats import EngineStats

R = TypeVar("R")
REST = 64  # flights


class Flight(Generic[R]):
    """From its launch until its results are there a plan keeps the device busy, and `stats` knows."""

    def __init__(self, pending: Pending[R], stats: EngineStats) -> None:
        self._pending, self._stats = pending, stats
        stats.take_off()

    def land(self, rehearsal: Rehearsal | None = None, work: Callable[[], object] | None = None) -> R:
        """Waits for the results. Where they were there before anybody asked, the device has idled, nobody knows how long.

        work: done before, if `rehearsal` finds the time.
        """
        late = self._pending.done()
        if not late and rehearsal is not None and work is not None and rehearsal.due():
            work()
            late = rehearsal.late(self._pending.done())
        self._pending.wait()
        self._stats.land(late)
        return self._pending.read()


class Rehearsal:
    """What follows a flight, done once before it lands, with what is at hand and for nothing but this: its code and tables are then in
    the CPU's caches, out of which everything else that a step does has driven them.

    Flights that turn out to be too short for it are left alone for a while.
    """

    def __init__(self) -> None:
        self._rest = 0

    def due(self) -> bool:
        self._rest = max(0, self._rest - 1)
        return not self._rest

    def late(self, done: bool) -> bool:
        """Whether the results were there before the rehearsal had ended."""
        if done:
            self._rest = REST
        return done
