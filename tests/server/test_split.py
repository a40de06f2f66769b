"""Reasoning is cut at the token </think>, wherever it falls in a run and however late its text comes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from model.tool_parser import Markers, OutputMachine, Part
from runtime.stream import TextStream
from runtime.types import SamplingParams
from server.split import OutputCut

THINK_END, SECTION = 262, 263


MARKERS = Markers(None, THINK_END, SECTION)


def cut_of(tokenizer: Any) -> OutputCut:
    shown = {token: len(tokenizer.decode([token])) for token in (THINK_END, SECTION)}
    return OutputCut(OutputMachine(MARKERS, True, False), tokenizer.stream(), shown)


def both(cut: OutputCut, tokens: Sequence[int], text: str) -> tuple[str, str]:
    """(reasoning, content) of one push."""
    pieces = cut.push(tokens, text)
    return tuple("".join(t for part, t in pieces if part is wanted) for wanted in (Part.REASONING, Part.CONTENT))  # type: ignore[return-value]


def run(tokenizer: Any, tokens: Sequence[int], sizes: Sequence[int], stop: tuple[str, ...] = ()) -> tuple[str, str, int]:
    """The tokens in runs of these sizes, through the stream that holds text back."""
    stream = TextStream(tokenizer.stream(), SamplingParams(max_tokens=10_000, stop=stop), tokenizer.eos_ids)
    cut = cut_of(tokenizer)
    reasoning, content, at = "", "", 0
    for size in sizes:
        part = tokens[at : at + size]
        at += size
        pushed = stream.push(part)
        r, c = both(cut, part[: pushed.kept], pushed.text)
        reasoning, content = reasoning + r, content + c
        if pushed.finish:
            break
    r, c = both(cut, (), stream.flush())
    return reasoning + r, content + c, cut.machine.reasoning_tokens


def sizes_for(count: int, rng: random.Random) -> list[int]:
    sizes = []
    while sum(sizes) < count:
        sizes.append(rng.randint(1, 5))
    return sizes


CASES = [
    ("think ", THINK_END, "answer"),
    ("삼겹살 👍🏽", THINK_END, "ďábel 世"),
    ("", THINK_END, "x"),
    ("x", THINK_END, ""),
    ("it spells </think> itself ", THINK_END, " and </think> again"),
    ("call ", SECTION, "functions.a:0"),
]


@pytest.mark.parametrize(("before", "marker", "after"), CASES)
@pytest.mark.parametrize("stop", [(), ("answerZ", "think <Z", "</think>Z", " andZ")])  # held back, never complete
def test_every_split_point_gives_the_same_parts(tokenizer: Any, before: str, marker: int, after: str, stop: tuple[str, ...]) -> None:
    tokens = [*before.encode(), marker, *after.encode()]
    wanted = (before, ("<|tool_calls_section_begin|>" if marker == SECTION else "") + after)
    rng = random.Random(1)
    plans = (
        [[1] * len(tokens), [len(tokens)]]
        + [[i, len(tokens) - i] for i in range(1, len(tokens))]
        + [sizes_for(len(tokens), rng) for _ in range(30)]
    )
    for sizes in plans:
        reasoning, content, _ = run(tokenizer, tokens, [s for s in sizes if s], stop)
        assert (reasoning, content) == wanted, sizes


def test_a_half_character_before_the_end_stays_reasoning(tokenizer: Any) -> None:
    tokens = [*"é".encode()[:1], THINK_END, *b"ok"]
    for sizes in ([1] * 4, [2, 2], [4]):
        assert run(tokenizer, tokens, sizes)[:2] == ("�", "ok")


def test_without_an_end_all_is_reasoning(tokenizer: Any) -> None:
    assert run(tokenizer, list(b"abc"), [1, 1, 1]) == ("abc", "", 3)


def test_reasoning_tokens_do_not_count_the_marker(tokenizer: Any) -> None:
    assert run(tokenizer, [97, 98, THINK_END, 99], [4])[2] == 2


def test_a_cut_moved_by_one_is_noticed(tokenizer: Any) -> None:
    """The mutation: a marker believed one character shorter than it is."""
    cut = OutputCut(OutputMachine(MARKERS, True, False), tokenizer.stream(), {THINK_END: 7, SECTION: 0})
    assert both(cut, [97, THINK_END, 98], "a</think>b") != ("a", "b")
    assert both(cut_of(tokenizer), [97, THINK_END, 98], "a</think>b") == ("a", "b")
