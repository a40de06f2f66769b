"""A target, its drafter and their caches bound together: what a rank executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from model import dflash, kimi_k26
from runtime.types import Array, DraftPlan, StepPlan


@dataclass(frozen=True, slots=True)
class Drafter:
    config: dflash.Config
    weights: dflash.Weights
    cache: dflash.Cache


class BlockShape(NamedTuple):
    """Rows of a block, the token of those that ask, and where positions stop."""

    block: int
    mask_token: int
    last_position: int


@dataclass(frozen=True, slots=True)
class BoundModel:
    """One rank's model over its caches: cache [layers, S, L+R] holds a row for every slot of every page."""

    config: kimi_k26.Config
    weights: kimi_k26.Weights
    cache: Array
    page_size: int
    last_position: int  # drafts stop their positions here
    drafter: Drafter | None = None
    near: Any = None  # the stages before and after, a `runtime.comm.Neighbours`
    taps: tuple[int, ...] = ()  # what the drafter of a later stage wants

    @property
    def draws(self) -> bool:
        """Whether this is the last stage, which has the head."""
        return self.weights.head is not None

    def step(self, ops: Any, comm: Any, plan: StepPlan) -> tuple[Array, Array] | None:
        taps = self.drafter.config.taps if self.drafter else self.taps
        return kimi_k26.forward(ops, comm, self.config, self.weights, plan, self.cache, self.page_size, taps, self.near)

    def context(self, ops: Any, taps: Array, plan: DraftPlan) -> None:
        if self.drafter:
            dflash.write_context(ops, self.drafter.config, self.drafter.weights, taps, plan, self.drafter.cache)

    @property
    def block_shape(self) -> BlockShape:
        """What the rows of a block are made from, for whoever makes them elsewhere than on the host."""
        config = self._drafter().config
        return BlockShape(config.block, config.mask_token, self.last_position)

    def block(self, ops: Any, comm: Any, plan: DraftPlan) -> Array:
        return self.block_from(ops, comm, plan, dflash.block_rows(self._drafter().config, plan, self.last_position))

    def block_from(self, ops: Any, comm: Any, plan: DraftPlan, rows: tuple[Array, Array, Array]) -> Array:
        """The block of rows made already: token, pos [B*block] and mask_rows [B*(block-1)]."""
        d = self._drafter()
        return dflash.block_logits(ops, comm, d.config, d.weights, self.weights, *rows, plan, d.cache, self.page_size)

    def _drafter(self) -> Drafter:
        if self.drafter is None:
            raise RuntimeError("this model was loaded without a drafter")
        return self.drafter
