"""Times of a step, told to a cost curve: what verification, draft and host took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from runtime.curve import CostCurve
from runtime.speculate import Load
from runtime.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Times:
    """Of one step, seconds."""

    load: Load
    drafted: int  # streams
    step_s: float
    draft_s: float
    whole_s: float

    @property
    def host_s(self) -> float:
        """What neither verification nor draft explains."""
        return self.whole_s - self.step_s - self.draft_s


class StepClock:
    """From `start` to `read` is one step.

    prompts: whether steps that are mostly prompt rows count. They cost less than trees of as many rows, since a chunk
    wants one token (at 1,024 rows the head is 2.4 TFLOP), so a curve that trees are priced by should not learn from them.
    """

    def __init__(self, curve: CostCurve, prompts: bool = False) -> None:
        self.curve, self.prompts = curve, prompts
        self.load = Load(0, 0, 1 << 30, 0, 0)  # of the step that was started last
        self.drafted = 0  # streams drafted for in it
        self._started_s = self._flown_s = self._draft_s = 0.0

    def start(self, load: Load, stats: EngineStats) -> None:
        self.load, self.drafted = load, 0
        self._started_s, self._flown_s, self._draft_s = time.perf_counter(), stats.flown_s, 0.0

    def count_draft(self, streams: int, stats: EngineStats) -> None:
        """The draft for so many streams, a step's first flight, has landed."""
        self.drafted, self._draft_s = streams, stats.flown_s - self._flown_s

    def read(self, stats: EngineStats) -> Times:
        """The step's times, as it ends. A flight whose end nobody saw took 0 s, which teaches nothing."""
        step_s = stats.flown_s - self._flown_s - self._draft_s
        return Times(self.load, self.drafted, step_s, self._draft_s, time.perf_counter() - self._started_s)

    def teach(self, rows: int, bucket: int, times: Times, apart_s: float = 0.0) -> None:
        """Tells the curve what a step of `rows` live rows took; apart_s: of the host, and priced elsewhere."""
        load, curve = times.load, self.curve
        if self.prompts or 2 * load.prompt <= bucket:
            curve.observe_step(rows, load.ctx, times.step_s, bucket)
        if load.decoding and not load.prompt:
            curve.host.observe(load.decoding, rows - load.decoding, times.drafted > 0, max(times.host_s - apart_s, 1e-9))
        if times.drafted:
            curve.observe_draft(times.drafted, times.draft_s)
