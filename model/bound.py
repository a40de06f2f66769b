"""A target, its drafter and their caches bound together: what a rank executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model import dflash, kimi_k26
from runtime.types import Array, DraftPlan, StepPlan


@dataclass(frozen=True, slots=True)
class Drafter:
    config: dflash.Config
    weights: dflash.Weights
    cache: dflash.Cache


@dataclass(frozen=True, slots=True)
class BoundModel:
    """One rank's model over its caches: cache [layers, S, L+R] holds a row for every slot of every page."""

    config: kimi_k26.Config
    weights: kimi_k26.Weights
    cache: Array
    page_size: int
    last_position: int  # drafts stop their positions here
    drafter: Drafter | None = None

    def step(self, ops: Any, comm: Any, plan: StepPlan) -> tuple[Array, Array]:
        taps = self.drafter.config.taps if self.drafter else ()
        return kimi_k26.forward(ops, comm, self.config, self.weights, plan, self.cache, self.page_size, taps)

    def context(self, ops: Any, taps: Array, plan: DraftPlan) -> None:
        if self.drafter:
            dflash.write_context(ops, self.drafter.config, self.drafter.weights, taps, plan, self.drafter.cache)

    def block(self, ops: Any, comm: Any, plan: DraftPlan) -> Array:
        if self.drafter is None:
            raise RuntimeError("this model was loaded without a drafter")
        d = self.drafter
        token, pos, mask_rows = dflash.block_rows(d.config, plan, self.last_position)
        return dflash.block_logits(ops, comm, d.config, d.weights, self.weights, token, pos, mask_rows, plan, d.cache, self.page_size)
