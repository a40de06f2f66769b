"""What a graph leaves for the host: rows in mapped memory, and the number of the launch once they are all there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.graph.driver import Driver
from runtime.kernels_cu import plan_io
from runtime.kernels_cu._call import Call
from runtime.kernels_cu.array import NUMPY, WIDTHS, DeviceArray
from runtime.types import Array

ASK_EVERY = 2048  # polls between two looks at the clock and the stream: a millisecond or less


class DeviceStuck(RuntimeError):
    """The device did not deliver a step: it failed, or took longer than the deadline."""


@dataclass(frozen=True, slots=True)
class Column:
    """One result: numbers of a row, their dtype ("i32", "f32", "bool"); asked: sent only if the plan wants alternatives."""

    width: int
    dtype: str
    asked: bool = False

    @property
    def row_bytes(self) -> int:
        return self.width * WIDTHS[self.dtype]


class Results:
    """Mapped room for `rows` rows of each column, and the number that the last node of a graph writes behind them."""

    def __init__(self, driver: Driver, rows: int, columns: Mapping[str, Column]) -> None:
        self._driver, self.columns = driver, {name: column for name, column in columns.items() if column.width}
        places, at = {}, 256
        for name, column in self.columns.items():
            places[name] = at
            at += -(-rows * column.row_bytes // 256) * 256
        self._memory = driver.mapped(at)
        self._places = places
        self._seen, self._experts = (self._memory.host[4 * i : 4 * i + 4].view(np.uint32) for i in range(2))
        self._rows = {name: self._column(rows, places[name], column) for name, column in self.columns.items()}

    @property
    def experts(self) -> int:
        """Distinct experts of the last launch, the sum over the layers that its `unions` named; 0 where it named none."""
        return int(self._experts[0])

    def call(
        self,
        arrays: Mapping[str, DeviceArray],
        *,
        live: int,
        number: int,
        logprobs: int = 0,
        live_seqs: int = 0,
        unions: Sequence[tuple[int, int]] = (),
    ) -> Call:
        """The node that publishes; arrays: where the columns' rows lie on the device. Addresses as `plan_io.publish` takes them."""
        sent = [
            plan_io.Result(arrays[name].flat, self._memory.address + self._places[name], column.row_bytes, column.asked)
            for name, column in self.columns.items()
        ]
        here, more = self._memory.address, {"logprobs": logprobs, "live_seqs": live_seqs}
        return plan_io.publish(sent, live=live, number=number, sequence=here, experts=here + 4, unions=unions, **more)

    def wait(self, number: int, deadline_s: float, what: str) -> None:
        """Polls until launch `number` is done. Raises DeviceStuck if the stream fails, or after deadline_s seconds.

        Each poll gives up the interpreter's lock, so that a server's other threads run meanwhile. It yields and does not sleep:
        even a sleep of 0 s ends by the kernel's timer slack of 50 us (75 us a poll measured on Linux 6.18 with Python 3.11, 0.3 us
        with a yield). Results would be seen that much late, and by a core that has been idle.
        """
        seen, pause, polls, end = self._seen, os.sched_yield, 0, 0.0
        while seen[0] != number:
            pause()
            polls += 1
            if polls % ASK_EVERY:
                continue
            now = time.monotonic()
            end = end or now + deadline_s
            failure = self._driver.failure()
            if failure is not None or now > end:
                reason = failure or f"nothing for {deadline_s:g} s"
                raise DeviceStuck(f"{what}: launch {number} was not finished, the last that was is {int(seen[0])}: {reason}")

    def done(self, number: int) -> bool:
        return bool(self._seen[0] == number)

    def read(self, name: str, rows: int) -> Array:
        """A copy of a column's first rows, [rows, width] or [rows]."""
        found: Array = self._rows[name][:rows].copy()
        return found

    def _column(self, rows: int, at: int, column: Column) -> Array:
        """A view of all its rows."""
        flat = self._memory.host[at : at + rows * column.row_bytes].view(NUMPY[column.dtype])
        found: Array = flat.reshape((rows, column.width) if column.width > 1 or column.asked else (rows,))
        return found


class Launch:
    """One replay of a graph, from now until its results are there. us: what that took, once it has been waited for."""

    def __init__(self, results: Results, number: int, deadline_s: float, what: str) -> None:
        self._results, self._number, self._deadline_s, self._what = results, number, deadline_s, what
        self._start_s, self.us = time.perf_counter(), 0.0

    def done(self) -> bool:
        return self._results.done(self._number)

    def wait(self) -> None:
        """As `Results.wait`."""
        self._results.wait(self._number, self._deadline_s, self._what)
        self.us = (time.perf_counter() - self._start_s) * 1e6


def result_columns(top: int) -> dict[str, Column]:
    """A step's: what `StepResult` holds; top: most alternatives."""
    return {
        "target": Column(1, "i32"),
        "logp": Column(1, "f32"),
        "finite": Column(1, "bool"),
        "top_ids": Column(top, "i32", asked=True),
        "top_logp": Column(top, "f32", asked=True),
    }


def draft_columns(top: int) -> dict[str, Column]:
    """A draft's, for each depth of each stream."""
    return {"ids": Column(top, "i32"), "logp": Column(top, "f32")}


def wanted_alternatives(logprobs: Array) -> int:
    """The alternatives that a plan asks for: the largest of its sequences' [B], 0 if none."""
    return max(int(logprobs.max(initial=-1)), 0)
