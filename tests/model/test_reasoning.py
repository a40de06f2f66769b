"""Whether a prompt opens the reasoning."""

from __future__ import annotations

from model.reasoning import starts_in_reasoning

BEGIN, END = 54, 55


def test_only_the_end_of_the_prompt_counts() -> None:
    assert starts_in_reasoning([1, BEGIN], BEGIN)
    assert not starts_in_reasoning([1, BEGIN, END], BEGIN)
    assert not starts_in_reasoning([BEGIN, 1], BEGIN)
    assert not starts_in_reasoning([], BEGIN)
