"""Times of a step, told to a cost curve: what verification, draft and host took."""

from __future__ import annotations

import time

from runtime.curve import CostCurve
from runtime.speculate import Load
from runtime.stats import EngineStats


class StepClock:
    """From `start` to `stop` is one step. The host's share is what neither verification nor draft explains.

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

    def stop(self, bucket: int, stats: EngineStats) -> float:
        """Teaches the curve; seconds of the whole step. A flight whose end nobody saw took 0 s, which teaches nothing."""
        step_s = stats.flown_s - self._flown_s - self._draft_s
        whole_s = time.perf_counter() - self._started_s
        if self.prompts or 2 * self.load.prompt <= bucket:
            self.curve.observe_step(bucket, self.load.ctx, step_s)
        self.curve.observe_overhead(max(whole_s - step_s - self._draft_s, 1e-9))
        if self.drafted:
            self.curve.observe_draft(self.drafted, self._draft_s)
        return whole_s
