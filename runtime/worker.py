"""One rank: a model, a drafter, their caches and a backend, executing plans."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from runtime.comm import Comm
from runtime.types import Array, DraftLogits, DraftPlan, StepPlan, StepResult


class TargetModel(Protocol):
    """A target bound to its weights and cache (`model.bound` makes one): all that a rank asks of it."""

    def step(self, ops: Any, comm: Any, plan: StepPlan) -> tuple[Array, Array] | None:
        """Logits [r, V / tp] f32 of the out_rows, a rank's share, and taps [m, n, H] of all rows; None where another stage goes on."""

    def context(self, ops: Any, taps: Array, plan: DraftPlan) -> None:
        """Materialises drafter context of the plan's tap_rows."""

    def block(self, ops: Any, comm: Any, plan: DraftPlan) -> Array:
        """Logits [B*D, V / tp] f32 of the blocks of the plan's roots: this rank's share of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an executor can take; the scheduler plans inside it."""

    vocab_size: int
    max_rows: int
    num_pages: int
    page_size: int
    max_positions: int
    draft_depth: int = 0  # 0: no drafter
    draft_top_k: int = 16
    experts: int = 0  # of a mixture-of-experts layer; 0: not known


class Worker:
    """Executes plans on one backend. `step` leaves the taps of its rows for the `draft` that follows it."""

    def __init__(self, backend: Any, comm: Comm, model: TargetModel, limits: Limits) -> None:
        self.limits = limits
        self._ops = backend
        self._comm = comm
        self._model = model
        self._taps: Array | None = None

    def step(self, plan: StepPlan) -> StepResult:
        """Runs the target over the plan's rows and draws the token after each out_row; draws none if another stage goes on."""
        start = time.perf_counter()
        ops, rows = self._ops, len(plan.out_rows)
        made = self._model.step(ops, self._comm, plan)
        if made is None:
            return undrawn((time.perf_counter() - start) * 1e6, self._experts())
        logits, self._taps = made
        wanted = max(int(plan.logprobs.max(initial=-1)), 0)
        target = ops.buffer("target", (rows,), "i32")
        logp = ops.buffer("target_logp", (rows,), "f32")
        finite = ops.buffer("finite", (rows,), "bool")
        top_ids = ops.buffer("top_ids", (rows, wanted), "i32")
        top_logp = ops.buffer("top_logp", (rows, wanted), "f32")
        if rows:
            self._comm.sample(
                ops,
                logits,
                plan.drawing,
                target=target,
                logp=logp,
                finite=finite,
                top_ids=top_ids,
                top_logp=top_logp,
            )
        drawn, its_logp, ok, ids, logps = (ops.host(a) for a in (target, logp, finite, top_ids, top_logp))
        return StepResult(drawn, its_logp, ok, ids, logps, (time.perf_counter() - start) * 1e6, self._experts())

    def draft(self, plan: DraftPlan) -> DraftLogits:
        """Materialises the context of tap_rows (rows of the last step), then proposes a block for each root."""
        ops, depth, top_k = self._ops, self.limits.draft_depth, self.limits.draft_top_k
        if len(plan.tap_rows):
            if self._taps is None:
                raise RuntimeError("draft: tap_rows name rows of the last step, but no step has run")
            self._model.context(ops, self._taps.reshape(self._taps.shape[0], -1), plan)
        streams = len(plan.root)
        if not streams:
            return DraftLogits(np.zeros((0, depth, top_k), np.int32), np.zeros((0, depth, top_k), np.float32))
        logits = self._model.block(ops, self._comm, plan)
        ids = ops.buffer("draft_ids", (streams * depth, top_k), "i32")
        logp = ops.buffer("draft_logp", (streams * depth, top_k), "f32")
        self._comm.top_logprobs(ops, logits, ids=ids, logp=logp)
        shape = (streams, depth, top_k)
        return DraftLogits(ops.host(ids).reshape(shape), ops.host(logp).reshape(shape))

    def close(self) -> None:
        self._taps = None

    def _experts(self) -> float:
        counts = getattr(self._ops, "experts_hit", None)
        return float(counts()) if counts is not None else 0.0


def undrawn(step_us: float, experts: float) -> StepResult:
    """What a stage before the last says of a step: no rows."""
    none = np.zeros(0, np.float32)
    tokens, wide = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
    return StepResult(tokens, none, np.zeros(0, np.bool_), wide, wide.astype(np.float32), step_us, experts)
