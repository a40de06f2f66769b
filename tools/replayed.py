"""An executor whose steps are real and whose text is a recorded one: what drafts are worth is the record's, what rows cost is the model's.

With weights that say nothing (a model of full size cut to a few layers, filled with hashes) no draft would be accepted. Here
the target "draws" the recorded continuation and the drafter "offers" its recorded marginals (tools/replay.py), while every
step and every draft runs on the device as planned: same rows, same trees, same pages.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from runtime.executor import Executor, Pending, begin_draft, begin_step
from runtime.types import I64, Array, DraftLogits, DraftPlan, StepPlan, StepResult
from tools.replay import States


class ReplayedText:
    """Runs plans on `inner` and answers from `states`. A request's seed says where in the texts its stream reads.

    Requests must be greedy, each of its own first cache page (no prefix caching). ValueError if a recorded token is outside
    the vocabulary of `inner`.
    """

    def __init__(self, inner: Executor, states: States) -> None:
        depth, choices = states.logits.ids.shape[1:]
        vocab = inner.limits.vocab_size
        largest = int(max(states.logits.ids.max(), states.truth.max()))
        if largest >= vocab:
            raise ValueError(f"traces: token {largest} is outside the model's vocabulary of {vocab}")
        self._inner = inner
        self._states = states
        self._drafts = inner.limits.draft_depth > 0
        self._readers: dict[int, int] = {}  # first page of a sequence -> its seed
        self.limits = dataclasses.replace(inner.limits, draft_depth=depth, draft_top_k=choices)

    def state(self, seed: Array | int, pos: Array | int) -> I64:
        """The recorded state of the token at `pos` of the stream `seed`; streams begin spread over the texts."""
        found: I64 = (np.asarray(seed).astype(np.int64) * 997 + np.asarray(pos)) % len(self._states)
        return found

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        """As `step`. The look into the record counts as the device's time."""
        inner, drawn = begin_step(self._inner, plan), list[Array]()

        def wait() -> None:
            inner.wait()
            self._readers |= {int(pages[0]): int(seed) for pages, seed in zip(plan.pages, plan.seed, strict=True)}
            rows = plan.out_rows
            at = self.state(plan.seed[plan.seq[rows]], plan.pos[rows])
            drawn.append(self._states.truth[at, 0].astype(np.int32))

        def read() -> StepResult:
            return dataclasses.replace(inner.read(), target=drawn[0], finite=np.ones(len(drawn[0]), np.bool_))

        return Pending(inner.done, wait, read)

    def draft(self, plan: DraftPlan) -> DraftLogits:
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        """As `draft`, likewise."""
        inner, offered = begin_draft(self._inner, plan) if self._drafts else None, list[DraftLogits]()

        def wait() -> None:
            if inner is not None:
                inner.wait()
            at = self.state(np.array([self._readers[int(pages[0])] for pages in plan.pages], np.int64), plan.pos)
            offered.append(DraftLogits(self._states.logits.ids[at], self._states.logits.logp[at]))

        def read() -> DraftLogits:
            if inner is not None:
                inner.read()
            return offered[0]

        return Pending(lambda: inner is not None and inner.done(), wait, read)

    def close(self) -> None:
        self._inner.close()
