"""A worker without a model: plans are packed as for a device, and what comes back is a recorded text."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.config import EngineConfig
from runtime.executor import Pending
from runtime.loading import plan_layout
from runtime.plan import DraftLayout, Packer
from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits

TOP_K = 16


class StandIn:
    """Takes plans as `CudaWorker` does, up to the launch, and answers at once: nothing drawn, nothing offered."""

    def __init__(self, config: EngineConfig, limits: Limits) -> None:
        self.limits, layout = limits, plan_layout(config, limits)
        drafts = DraftLayout(layout.max_seqs, layout.max_pages, limits.max_rows)
        self._pack_step, self._pack_draft = (Packer(each, np.zeros(each.nbytes, np.uint8)).pack for each in (layout, drafts))

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        self._pack_step(plan)
        rows = len(plan.out_rows)
        ids, logp = np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32)
        return _landed(StepResult(np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.ones(rows, np.bool_), ids, logp, 0.0))

    def draft(self, plan: DraftPlan) -> DraftLogits:
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        self._pack_draft(plan)
        shape = (len(plan.root), self.limits.draft_depth, TOP_K)
        return _landed(DraftLogits(np.zeros(shape, np.int32), np.zeros(shape, np.float32)))

    def close(self) -> None:
        """Nothing is held."""


def _landed(result: Any) -> Pending[Any]:
    """There when it is asked for, and not counted as having been so before."""
    return Pending(lambda: False, lambda: None, lambda: result)
