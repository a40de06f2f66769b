"""Time on a GPU as a step meets it: launches captured in a graph, the graph replayed, the median reported. Needs CuPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Run = Callable[[int], None]  # enqueues on a stream
COOL_DOWN_S = 0.3
BURST = 9  # replays in the first figures
SUSTAINED_S = 0.5


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call. p10, p50, p90: the first replays after a cool-down, as a layer between others meets the
    card. sustained: median from half a second of back-to-back calls on, where the power limit may have lowered the clock."""

    p10: float
    p50: float
    p90: float
    sustained: float


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


def timing(stream: Any, graph: Any, calls: int) -> Timing:
    """The figures that are reported of a graph of so many calls; 1 s."""
    time.sleep(COOL_DOWN_S)
    burst = replay_us(stream, graph, 0.0, BURST)
    replay_us(stream, graph, SUSTAINED_S, most=1 << 30)
    late = replay_us(stream, graph, SUSTAINED_S / 2, 3)
    p10, p50, p90 = np.percentile(burst, [10, 50, 90]) / calls
    return Timing(float(p10), float(p50), float(p90), float(np.median(late)) / calls)
