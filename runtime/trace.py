"""A Chrome trace of steps (`ph: X` events, microseconds), to be opened at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType

MAX_EVENTS = 2_000_000  # about 250 MB; a step writes 8, so this is a quarter of a million steps
FLUSH_EVENTS = 256


class StepTrace:
    """Writes events to a file as they happen; times are time.perf_counter() seconds.

    One row of the trace is the engine's thread: a `step` span for every step, and inside it the
    stages draft grow plan verify accept emit. What is written so far can be opened at any time, also after
    the process was killed: the format lets the closing bracket be absent. After MAX_EVENTS nothing
    more is written. Raises OSError if the file can not be made.
    """

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._start_s = time.perf_counter()
        self._rank = rank
        self._lock = threading.Lock()  # close() comes from another thread than the steps
        self.events = 0
        self._file.write("[\n")
        for name, what in (("process_name", f"rank {rank}"), ("thread_name", "engine")):
            self._write({"ph": "M", "name": name, "pid": rank, "tid": 1, "args": {"name": what}})

    def span(self, name: str, start_s: float, end_s: float, **args: object) -> None:
        """One span of the engine's thread; `args` is shown when it is clicked."""
        event = {"ph": "X", "cat": "step", "name": name, "pid": self._rank, "tid": 1}
        event |= {"ts": self._at(start_s), "dur": round((end_s - start_s) * 1e6, 1)}
        self._write(event | ({"args": args} if args else {}))

    def count(self, name: str, at_s: float, **values: float) -> None:
        """One point of a graph above the spans."""
        self._write({"ph": "C", "name": name, "pid": self._rank, "ts": self._at(at_s), "args": values})

    def close(self) -> None:
        """Ends the file; idempotent."""
        with self._lock:
            if not self._file.closed:
                self._file.write(
                    json.dumps({"ph": "M", "name": "process_labels", "pid": self._rank, "args": {"labels": f"pid {os.getpid()}"}})
                )
                self._file.write("\n]\n")
                self._file.close()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _at(self, s: float) -> float:
        return round((s - self._start_s) * 1e6, 1)

    def _write(self, event: dict[str, object]) -> None:
        with self._lock:
            if self._file.closed or self.events >= MAX_EVENTS:
                return
            self._file.write(json.dumps(event) + ",\n")
            self.events += 1
            if self.events % FLUSH_EVENTS == 0:
                self._file.flush()
