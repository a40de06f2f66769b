"""A worker without a model: plans are packed as for a device, and what comes back is a recorded text, at once or after as long as a
device would take."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from runtime.config import EngineConfig
from runtime.curve import CostCurve
from runtime.executor import Pending
from runtime.loading import plan_layout
from runtime.plan import DraftLayout, Packer
from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits

TOP_K = 16


class StandIn:
    """Takes plans as `CudaWorker` does, up to the launch, and answers: nothing drawn, nothing offered.

    flights: steps and drafts then take what this curve says of short contexts; None: no time.
    """

    def __init__(self, config: EngineConfig, limits: Limits, flights: CostCurve | None = None) -> None:
        self._flights = flights
        self.limits, layout = limits, plan_layout(config, limits)
        drafts = DraftLayout(layout.max_seqs, layout.max_pages, limits.max_rows)
        self._pack_step, self._pack_draft = (Packer(each, np.zeros(each.nbytes, np.uint8)).pack for each in (layout, drafts))

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        self._pack_step(plan)
        rows = len(plan.out_rows)
        ids, logp = np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32)
        return _landed(
            StepResult(np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.ones(rows, np.bool_), ids, logp, 0.0),
            self._seconds(plan.bucket, 0),
        )

    def draft(self, plan: DraftPlan) -> DraftLogits:
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        self._pack_draft(plan)
        shape = (len(plan.root), self.limits.draft_depth, TOP_K)
        return _landed(DraftLogits(np.zeros(shape, np.int32), np.zeros(shape, np.float32)), self._seconds(0, len(plan.root)))

    def _seconds(self, bucket: int, roots: int) -> float:
        if self._flights is None:
            return 0.0
        return float(self._flights.step(bucket)) if bucket else self._flights.draft(roots)

    def close(self) -> None:
        """Nothing is held."""


def _landed(result: Any, seconds: float) -> Pending[Any]:
    """Flies for so long. Without any time it is there when it is asked for, and not counted as having been so before."""
    end_s = time.perf_counter() + seconds

    def wait() -> None:
        while time.perf_counter() < end_s:
            pass

    return Pending(lambda: seconds > 0 and time.perf_counter() >= end_s, wait, lambda: result)
