"""An executor whose steps are real and whose text is a recorded one: what drafts are worth is the record's, what rows cost is the model's.

With weights that say nothing (a model of full size cut to a few layers, filled with hashes) no draft would be accepted. Here
the target "draws" the recorded continuation and the drafter "offers" its recorded marginals (tools/replay.py), while every
step and every draft runs on the device as planned: same rows, same trees, same pages.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from runtime.executor import Executor
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
        result = self._inner.step(plan)
        self._readers |= {int(pages[0]): int(seed) for pages, seed in zip(plan.pages, plan.seed, strict=True)}
        rows = plan.out_rows
        at = self.state(plan.seed[plan.seq[rows]], plan.pos[rows])
        target = self._states.truth[at, 0].astype(np.int32)
        return dataclasses.replace(result, target=target, finite=np.ones(len(rows), np.bool_))

    def draft(self, plan: DraftPlan) -> DraftLogits:
        if self._drafts:
            self._inner.draft(plan)
        at = self.state(np.array([self._readers[int(pages[0])] for pages in plan.pages], np.int64), plan.pos)
        return DraftLogits(self._states.logits.ids[at], self._states.logits.logp[at])

    def close(self) -> None:
        self._inner.close()
