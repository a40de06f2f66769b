"""Counts of one choice, usage over choices, and the speculation record's sums."""

from __future__ import annotations

import random

from runtime.types import Emission
from server.record import ChoiceRecord, speculation_of, usage_of


def record(*runs: tuple[int, int | None, int], prompt: int = 5) -> ChoiceRecord:
    """One emission for each (tokens, accepted, drafted)."""
    made = ChoiceRecord(prompt, 0.0)
    for at, (tokens, accepted, drafted) in enumerate(runs):
        made.observe(Emission("x", tuple(range(tokens)), "", cached_tokens=2, accepted=accepted, drafted=drafted), 1.0 + at)
    return made


def test_times_are_of_emissions_with_tokens() -> None:
    made = record((0, None, 0), (3, None, 0), (0, None, 0), (1, None, 0), (0, None, 0))
    assert (made.first_s, made.last_s, made.completion_tokens) == (2.0, 4.0, 4)


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    records = [
        record((4, None, 0), prompt=5),
        record((1, None, 0), prompt=5),
        record((2, None, 0), prompt=7),
        record((3, None, 0), prompt=7),
    ]
    usage = usage_of(records, prompts=2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 10, 22)
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_speculation_sums_agree_as_aiperf_checks_them() -> None:
    rng = random.Random(3)
    runs = [(a + 1, a, rng.randint(a, 16)) for a in (rng.randint(0, 7) for _ in range(200))]
    made = record((1, None, 0), *runs)
    found = speculation_of([made], 7, "detailed")
    assert found is not None
    assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1 == 8
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"] == 200
    assert (
        sum(j * count for j, count in enumerate(found["acceptance_histogram"]))
        == found["num_accepted_draft_tokens"]
        == sum(a for _, a, _ in runs)
    )
    assert found["num_accepted_draft_tokens"] <= found["num_draft_tokens"] == sum(d for _, _, d in runs)
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / 200
    assert found["per_step_accepted"] == [a for _, a, _ in runs]
    assert found["per_step_drafted"] == [d for _, _, d in runs]
    assert "per_step_accepted" not in (speculation_of([made], 7, "summary") or {})


def test_no_record_for_several_choices_or_without_speculation() -> None:
    made = record((3, 2, 8))
    assert speculation_of([made], 7, "none") is None
    assert speculation_of([made, made], 7, "summary") is None
    assert speculation_of([record((1, None, 0))], 7, "summary") is None


def test_steps_without_drafts_do_not_divide_by_zero() -> None:
    found = speculation_of([record((1, 0, 0))], 7, "summary")
    assert found is not None
    assert found["draft_acceptance_rate"] == 0.0


def test_experts_and_ranks_are_of_the_steps_that_had_them() -> None:
    made = record((1, None, 0))
    for accepted, ranks, experts in ((2, (0, 2), 5.0), (0, (), 0.0), (1, (0,), 6.0)):
        made.observe(Emission("x", (1,), "", accepted=accepted, drafted=4, ranks=ranks, experts=experts), 9.0)
    found = speculation_of([made], 7, "summary")
    assert found is not None
    assert found["accepted_rank_histogram"] == [2, 0, 1] and sum(found["accepted_rank_histogram"]) == found["num_accepted_draft_tokens"]
    assert found["unique_experts_per_step"] == 5.5, "the step that did not count them is left out"
    assert (speculation_of([record((1, 0, 4))], 7, "summary") or {})["unique_experts_per_step"] is None
