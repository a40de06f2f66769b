"""Time on a GPU as a step meets it: launches captured in a graph, the graph replayed, the median reported. Needs CuPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Run = Callable[[int], None]  # enqueues on a stream


def capture(stream: Any, runs: Sequence[Run]) -> Any:
    """A graph of these launches on a CuPy stream, replayed once; they must have run before (code is loaded lazily)."""
    with stream:
        stream.begin_capture()
        try:
            for run in runs:
                run(stream.ptr)
        finally:
            graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    return graph


def replay_us(stream: Any, graph: Any, seconds: float = 0.1, least: int = 5, most: int = 200) -> list[float]:
    """Microseconds of each replay by events, for about `seconds`."""
    import cupy

    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < least or (time.perf_counter() - begin < seconds and len(samples) < most):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        samples.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return samples


def time_us(stream: Any, runs: Sequence[Run], seconds: float = 0.1) -> float:
    """Median microseconds of one of `runs` inside a graph of all of them."""
    return float(np.median(replay_us(stream, capture(stream, runs), seconds))) / len(runs)
