"""A worker without a model: plans are packed as for a device, and what comes back is a recorded text."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.config import EngineConfig
from runtime.executor import Pending
from runtime.loading import plan_layout
from runtime.plan import DraftLayout, pack_draft, pack_plan
from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits

TOP_K = 16


class StandIn:
    """Takes plans as `CudaWorker` does, up to the launch, and answers at once: nothing drawn, nothing offered."""

    def __init__(self, config: EngineConfig, limits: Limits) -> None:
        self.limits, self._layout = limits, plan_layout(config, limits)
        self._draft_layout = DraftLayout(self._layout.max_seqs, self._layout.max_pages, limits.max_rows)
        self._blob, self._draft_blob = (np.zeros(layout.nbytes, np.uint8) for layout in (self._layout, self._draft_layout))

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        pack_plan(plan, self._layout, self._blob)
        rows = len(plan.out_rows)
        ids, logp = np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32)
        return _landed(StepResult(np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.ones(rows, np.bool_), ids, logp, 0.0))

    def draft(self, plan: DraftPlan) -> DraftLogits:
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        pack_draft(plan, self._draft_layout, self._draft_blob)
        shape = (len(plan.root), self.limits.draft_depth, TOP_K)
        return _landed(DraftLogits(np.zeros(shape, np.int32), np.zeros(shape, np.float32)))

    def close(self) -> None:
        """Nothing is held."""


def _landed(result: Any) -> Pending[Any]:
    """There when it is asked for, and not counted as having been so before."""
    return Pending(lambda: False, lambda: None, lambda: result)
