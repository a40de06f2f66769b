"""The split by token id, for every way to cut the stream."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.reasoning import ReasoningSplitter, starts_in_reasoning
from model.tokenizer import Tokenizer

BEGIN, END, SECTION = 54, 55, 43


def split(ids: list[int], cuts: list[int], starts: bool, begin: int | None = None) -> tuple[list[int], list[int]]:
    splitter = ReasoningSplitter(END, SECTION, starts, begin)
    reasoning: list[int] = []
    content: list[int] = []
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for a, b in pairwise(bounds):
        r, c = splitter.push(ids[a:b])
        reasoning += r
        content += c
    return reasoning, content


@pytest.mark.parametrize(
    ("ids", "reasoning", "content"),
    [
        ([1, 2, END, 3, 4], [1, 2], [3, 4]),
        ([END, 3], [], [3]),
        ([1, 2], [1, 2], []),
        ([1, SECTION, 2], [1], [SECTION, 2]),
        ([1, END, SECTION, 2], [1], [SECTION, 2]),
        ([1, SECTION, END, 2], [1], [SECTION, 2]),
        ([1, END, 2, END, 3], [1], [2, 3]),
        ([], [], []),
    ],
)
def test_where_reasoning_ends(ids: list[int], reasoning: list[int], content: list[int]) -> None:
    assert split(ids, [], True) == (reasoning, content)
    assert split(ids, [], False) == ([], [i for i in ids if i != END])
    if reasoning:
        assert split(ids, [], True) != split(ids, [], False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, BEGIN, END, SECTION]), max_size=12),
    st.lists(st.integers(0, 12), max_size=5),
    st.booleans(),
    st.sampled_from([None, BEGIN]),
)
def test_cuts_change_nothing(ids: list[int], cuts: list[int], starts: bool, begin: int | None) -> None:
    whole = split(ids, [], starts, begin)
    assert split(ids, cuts, starts, begin) == whole
    assert split(ids, list(range(len(ids))), starts, begin) == whole
    assert sum(map(len, whole)) == sum(i != END and i != begin for i in ids)


def test_a_model_that_opens_its_own_reasoning() -> None:
    assert split([BEGIN, 1, END, 2], [1], False, BEGIN) == ([1], [2])
    assert split([1, BEGIN, 2], [], False, BEGIN) == ([], [1, 2])  # later on it opens nothing
    assert split([BEGIN, 1, END, 2], [], False) == ([], [BEGIN, 1, 2])


def test_spelled_think_tags_are_text() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[2] / "model" / "demo")
    end, section = tokenizer.special["</think>"], tokenizer.special["<|tool_calls_section_begin|>"]
    spelled = tokenizer.encode("a </think> b <think> <|tool_calls_section_begin|>")
    splitter = ReasoningSplitter(end, section, True)
    assert splitter.push(spelled) == (spelled, []) and splitter.in_reasoning
    splitter = ReasoningSplitter(end, section, False)
    assert splitter.push(spelled) == ([], spelled)


def test_only_the_end_of_the_prompt_counts() -> None:
    assert starts_in_reasoning([1, BEGIN], BEGIN)
    assert not starts_in_reasoning([1, BEGIN, END], BEGIN)
    assert not starts_in_reasoning([BEGIN, 1], BEGIN)
    assert not starts_in_reasoning([], BEGIN)
