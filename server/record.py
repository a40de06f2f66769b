"""What happened to one choice: counts, times and the speculation record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from runtime.types import Emission
from server.protocol import CompletionDetails, PromptDetails, Usage

SpecDetail = Literal["none", "summary", "detailed"]


@dataclass(slots=True)
class ChoiceRecord:
    """Filled by observe() as emissions arrive; times are the event loop's clock, in seconds."""

    prompt_tokens: int
    submitted_s: float
    arrived_s: float = 0.0  # when its request came, before it was encoded and its grammar compiled; 0: as submitted_s
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    admitted_s: float = 0.0  # 0: not yet, or never
    first_s: float | None = None
    last_s: float = 0.0
    finish: str | None = None
    accepted: list[int] = field(default_factory=list)  # one entry a speculative step
    drafted: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # of accepted nodes among their siblings, 0 the likeliest
    experts: list[float] = field(default_factory=list)  # distinct ones that a layer hit, of each step that counted them

    @property
    def begun_s(self) -> float:
        return self.arrived_s or self.submitted_s

    def observe(self, emission: Emission, now_s: float) -> None:
        self.completion_tokens += len(emission.tokens)
        self.cached_tokens = max(self.cached_tokens, emission.cached_tokens)
        self.admitted_s = self.admitted_s or emission.admitted_s
        if emission.experts:
            self.experts.append(emission.experts)
        if emission.tokens:
            if self.first_s is None:
                self.first_s = now_s
            self.last_s = now_s
        if emission.accepted is not None:
            self.accepted.append(emission.accepted)
            self.drafted.append(emission.drafted)
            self.ranks += emission.ranks
        if emission.finish is not None:
            self.finish = emission.finish


def usage_of(records: list[ChoiceRecord], prompts: int = 1) -> Usage:
    """Usage of one answer. A prompt counts once, however many choices it has."""
    per_prompt = max(1, len(records) // max(1, prompts))
    heads = records[::per_prompt]
    prompt_tokens = sum(r.prompt_tokens for r in heads)
    completion_tokens = sum(r.completion_tokens for r in records)
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(sum(r.cached_tokens for r in heads)),
        CompletionDetails(sum(r.reasoning_tokens for r in records)),
    )


def speculation_of(records: list[ChoiceRecord], depth: int, detail: SpecDetail) -> dict[str, Any] | None:
    """The per-request speculation object in vLLM's form; None for more than one choice, or nothing to tell.

    num_spec_tokens is the greatest depth of a tree, num_draft_tokens the verified nodes without the
    root. The sums agree: histogram entries sum to num_spec_steps, j * entry[j] to the accepted count.
    """
    if detail == "none" or len(records) != 1 or not records[0].accepted:
        return None
    accepted, drafted = records[0].accepted, records[0].drafted
    histogram = [0] * (max(depth, *accepted) + 1)
    for count in accepted:
        histogram[count] += 1
    steps, total, nodes = len(accepted), sum(accepted), sum(drafted)
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + total / steps,
        "draft_acceptance_rate": total / nodes if nodes else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": nodes,
        "num_spec_tokens": len(histogram) - 1,
        "tree_nodes_per_step": nodes / steps,
        "accepted_rank_histogram": np.bincount(np.array(records[0].ranks, np.int64), minlength=1).tolist(),
        "unique_experts_per_step": sum(records[0].experts) / len(records[0].experts) if records[0].experts else None,
    }
    if detail == "detailed":
        found["per_step_accepted"] = accepted
        found["per_step_drafted"] = drafted
    return found
