"""Where a generation ends and what text goes out, against a rule that looks at the whole text anew for each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from runtime.stream import Pushed, TextStream
from runtime.types import MAX_STOP_CHARS, SamplingParams
from tests.pace import ratio

T = Tokenizer.load(Path(__file__).parents[2] / "model" / "demo")
BYTE = {T.token_bytes(i)[0]: i for i in range(T.vocab_size) if len(T.token_bytes(i)) == 1}
EOS = T.special["<|im_end|>"]
EOS_IDS = T.eos_ids


def ids(text: str | bytes) -> list[int]:
    """One token a byte."""
    return [BYTE[b] for b in (text.encode() if isinstance(text, str) else text)]


def stream(**params: Any) -> TextStream:
    params.setdefault("max_tokens", None)
    sampling = SamplingParams(**params)
    return TextStream(T.stream(sampling.skip_special_tokens), sampling, EOS_IDS)


def run(tokens: Sequence[int], cuts: Sequence[int] = (), **params: Any) -> Pushed:
    """All pushes in one, flushed at the end if nothing ended it."""
    s = stream(**params)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    kept, text, last = 0, "", Pushed(0, "")
    for a, b in pairwise(bounds):
        last = s.push(tokens[a:b])
        kept += last.kept
        text += last.text
    return Pushed(kept, text + s.flush(), last.finish, last.stop_reason)


def certain(tokens: Sequence[int], skip: bool) -> str:
    return T.stream(skip).push(tokens)


def oracle(tokens: Sequence[int], params: SamplingParams) -> Pushed:
    eos = frozenset() if params.ignore_eos else EOS_IDS
    skip, include = params.skip_special_tokens, params.include_stop_str_in_output
    for n, token in enumerate(tokens, 1):
        live = n > params.min_tokens
        if live and (token in eos or token in params.stop_token_ids):
            text = T.decode(tokens[: n if include else n - 1], skip)
            return Pushed(n, text, "stop", None if token in eos else token)
        last = n == params.max_tokens
        before, text = certain(tokens[: n - 1], skip), T.decode(tokens[:n], skip) if last else certain(tokens[:n], skip)
        matches = []
        for stop in params.stop:
            begins = [i for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > len(before)]
            matches += [(begins[0], -len(stop), stop)] if begins and live else []
        if matches:
            begin, minus, stop = min(matches)
            return Pushed(n, text[: begin - minus if include else begin], "stop", stop)
        if last:
            return Pushed(n, text, "length")
    return Pushed(len(tokens), T.decode(tokens, skip))


MULTI = [token for text in ("ab", "abc", "ba", "def", " the") for token in T.encode(text)]
TOKENS = st.lists(
    st.one_of(
        st.sampled_from(ids("abcab")),
        st.sampled_from(MULTI),
        st.sampled_from(ids("é世") + ids(b"\xff\xe4")),
        st.sampled_from([EOS, T.special["[EOS]"], T.special["</think>"], T.special["[PAD]"]]),
    ),
    max_size=14,
)
STOPS = st.lists(st.one_of(st.text("abc", min_size=1, max_size=4), st.sampled_from(["é", "a\ufffd", "</think>", "世a"])), max_size=4)
PARAMS = st.fixed_dictionaries(
    {
        "stop": STOPS.map(tuple),
        "max_tokens": st.one_of(st.none(), st.integers(5, 14)),
        "min_tokens": st.integers(0, 5),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "stop_token_ids": st.lists(st.sampled_from([*ids("c"), EOS, T.special["[PAD]"]]), max_size=2).map(tuple),
    }
)


@settings(max_examples=600, deadline=None)
@given(TOKENS, PARAMS, st.lists(st.integers(0, 14), max_size=6))
def test_equals_the_oracle_for_every_cut(tokens: list[int], params: dict[str, Any], cuts: list[int]) -> None:
    expected = oracle(tokens, SamplingParams(**params))
    assert run(tokens, **params) == expected
    assert run(tokens, cuts, **params) == expected
    assert run(tokens, range(len(tokens)), **params) == expected


@settings(max_examples=300, deadline=None)
@given(TOKENS, STOPS)
def test_holds_back_what_a_stop_may_begin_with_and_no_more(tokens: list[int], stops: list[str]) -> None:
    s, out = stream(stop=stops, ignore_eos=True), ""
    for n, token in enumerate(tokens, 1):
        pushed = s.push([token])
        out += pushed.text
        if pushed.finish:
            break
        text = certain(tokens[:n], True)
        held = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
        assert out == text[: len(text) - held]


def test_the_oracle_can_fail() -> None:
    """Cutting by whole pushes, as engines without per-token checks do, gives another answer."""
    assert run(ids("xENDyz"), stop=["END"]) == Pushed(4, "x", "stop", "END")
    assert run(ids("xENDyz"), stop=["END"]) != Pushed(6, "x", "stop", "END")
    assert run(ids("xENDyz")) == Pushed(6, "xENDyz")


# --- the reported cases ---


def test_stop_inside_an_accepted_run() -> None:  # D1
    pushed = stream(stop=["ab"]).push(ids("abcdefgh"))
    assert pushed == Pushed(2, "", "stop", "ab")


def test_stop_and_cap_in_one_run() -> None:  # D2
    six = ids("abcdef")
    assert stream(stop=["c"], max_tokens=5).push(six) == Pushed(3, "ab", "stop", "c")
    assert stream(stop=["f"], max_tokens=5).push(six) == Pushed(5, "abcde", "length", None)
    assert stream(stop=["e"], max_tokens=5).push(six) == Pushed(5, "abcd", "stop", "e")
    assert stream(max_tokens=5).push([*ids("ab"), EOS, *ids("cde")]) == Pushed(3, "ab", "stop", None)
    assert stream(max_tokens=3).push([*ids("ab"), EOS]) == Pushed(3, "ab", "stop", None)
    assert stream(max_tokens=3, stop_token_ids=ids("c")).push(ids("abcd")) == Pushed(3, "ab", "stop", BYTE[ord("c")])


@pytest.mark.parametrize("size", [1, 3, 5, 8, 13])
def test_exactly_max_tokens(size: int) -> None:  # D4
    s, kept, text = stream(max_tokens=8), 0, ""
    for i in range(0, 20, size):
        pushed = s.push(ids("abcdefghijklmnopqrst"[i : i + size]))
        kept += pushed.kept
        text += pushed.text
    assert (kept, text, s.finish) == (8, "abcdefgh", "length")


def test_no_part_of_a_stop_leaks() -> None:  # D6
    s = stream(stop=["END!"])
    assert [s.push(ids(part)).text for part in ("a", "E", "ND")] == ["a", "", ""]
    assert s.push(ids("!")) == Pushed(1, "", "stop", "END!") and s.flush() == ""
    s = stream(stop=["END!"])
    assert s.push(ids("EN")).text == "" and s.push(ids("X")).text == "ENX"
    s = stream(stop=["END!"])
    assert s.push(ids("EEN")).text == "E" and s.push(ids("D")).text == "" and s.push(ids("END!")) == Pushed(4, "END", "stop", "END!")


def test_held_text_is_released_at_every_end() -> None:
    assert run([*ids("aEN"), EOS], stop=["END!"]) == Pushed(4, "aEN", "stop", None)
    assert run(ids("aEN"), stop=["END!"], max_tokens=3) == Pushed(3, "aEN", "length")
    assert run(ids("aEN"), stop=["END!"]) == Pushed(3, "aEN")
    s = stream(stop=["END!"])
    s.push(ids("aEN") + ids(b"\xe4"))
    assert s.push(()) == Pushed(0, "")
    assert s.abort() == Pushed(0, "EN\ufffd", "abort")  # the byte may yet have become any character
    assert s.abort() == s.push(ids("x")) == Pushed(0, "", "abort") and s.flush() == ""


def test_flush_lets_more_follow() -> None:
    s = stream(stop=["END"])
    s.push(ids("aEN"))
    assert s.flush() == "EN"
    assert s.push(ids("DEND")) == Pushed(4, "D", "stop", "END")  # the released EN is out of reach


def test_min_tokens_counts_tokens_not_pushes() -> None:
    assert run([EOS, *ids("ab"), EOS, *ids("c")], min_tokens=3) == Pushed(4, "ab", "stop", None)
    assert run([EOS, *ids("ab"), EOS, *ids("c")], min_tokens=4) == Pushed(5, "abc")
    assert run(ids("abab"), stop=["ab"], min_tokens=2) == Pushed(4, "ab", "stop", "ab")
    assert run(ids("abab"), stop=["ab"], min_tokens=1) == Pushed(2, "", "stop", "ab")
    assert run(ids("aab"), stop=["ab"], min_tokens=2) == Pushed(3, "a", "stop", "ab")  # may begin earlier
    assert run(ids("aaa"), stop=["aa"], min_tokens=2) == Pushed(3, "a", "stop", "aa")  # overlaps a match that did not count
    assert run(ids("cab"), stop_token_ids=ids("c"), min_tokens=1) == Pushed(3, "cab")


def test_which_stop_wins() -> None:
    token = T.encode(" the")
    assert len(token) == 1
    assert run(token, stop=["e", "th", "the", "he"]) == Pushed(1, " ", "stop", "the")  # begins first, then the longer
    assert run(token, stop=["e", "th", "the", "he"], include_stop_str_in_output=True) == Pushed(1, " the", "stop", "the")
    assert run(ids(" the"), stop=["e", "th", "the", "he"]) == Pushed(3, " ", "stop", "th")  # one byte a token: complete first
    assert run([EOS], stop_token_ids=[EOS]) == Pushed(1, "", "stop", None)
    assert run([EOS], stop_token_ids=[EOS], ignore_eos=True) == Pushed(1, "", "stop", EOS)


def test_text_of_the_stop_itself() -> None:
    c = BYTE[ord("c")]
    assert run(ids("abcd"), stop_token_ids=[c]) == Pushed(3, "ab", "stop", c)
    assert run(ids("abcd"), stop_token_ids=[c], include_stop_str_in_output=True) == Pushed(3, "abc", "stop", c)
    assert run([*ids("a"), EOS], include_stop_str_in_output=True, skip_special_tokens=False) == Pushed(2, "a<|im_end|>", "stop")
    assert run([*ids("a"), EOS], skip_special_tokens=False) == Pushed(2, "a", "stop")
    assert run([*ids("a"), EOS], include_stop_str_in_output=True) == Pushed(2, "a", "stop")


def test_ignored_eos_is_an_ordinary_token() -> None:
    assert run([*ids("a"), EOS, *ids("b")], ignore_eos=True) == Pushed(3, "ab")
    assert run([*ids("a"), EOS, *ids("b")], ignore_eos=True, skip_special_tokens=False) == Pushed(3, "a<|im_end|>b")


def test_an_end_inside_a_character() -> None:
    assert run(ids("a世")[:-1], max_tokens=3) == Pushed(3, "a\ufffd", "length")
    assert run([*ids("a世")[:-1], EOS]) == Pushed(4, "a\ufffd", "stop")
    assert run(ids("a世")[:-1], max_tokens=3, stop=["a\ufffd"]) == Pushed(3, "", "stop", "a\ufffd")


def test_a_stop_that_overlaps_itself() -> None:
    assert run(ids("aabaabaac"), stop=["aabaac"]) == Pushed(9, "aab", "stop", "aabaac")
    assert run(ids("abababb"), stop=["ababb"]) == Pushed(7, "ab", "stop", "ababb")


def test_after_the_end_nothing_is_kept() -> None:
    s = stream(max_tokens=1)
    assert s.push(ids("ab")) == Pushed(1, "a", "length")
    assert s.push(ids("cd")) == Pushed(0, "", "length") and s.abort() == Pushed(0, "", "length") and s.flush() == ""


def test_numpy_tokens_give_plain_reasons() -> None:
    pushed = stream(stop_token_ids=[7]).push(np.array([5, 7], np.int32))
    assert pushed.finish == "stop" and type(pushed.stop_reason) is int and pushed.kept == 2


def test_long_stop_strings_stay_linear() -> None:
    """The longest stop that a request may bring holds back all its characters; none is looked at twice."""
    stop, text = "a" * (MAX_STOP_CHARS - 1) + "b", "a" * 4_000
    tokens = T.encode(text)

    def push_all(stop: str) -> str:
        s = stream(stop=[stop])
        return "".join(s.push(tokens[i : i + 8]).text for i in range(0, len(tokens), 8)) + s.flush()

    def look_again() -> None:
        for i in range(len(text)):
            said = text[max(0, i - MAX_STOP_CHARS) : i]
            next((k for k in range(1, len(stop)) if said.endswith(stop[:-k])), 0)

    assert push_all(stop) == text
    assert ratio(lambda: push_all(stop), lambda: push_all("ab")) < 5, "1, though the other holds back one character"
    assert ratio(look_again, lambda: push_all("ab"), rounds=1) > 5, "mutation: the ends of the text, one after the other"


@pytest.mark.parametrize("stops", [(), ("\n\n", "END", "###", "<|x|>")])
def test_cost_of_a_push(stops: tuple[str, ...]) -> None:
    """In units of the text's own pushes: 2 to 3 without stops, 5 to 7 with four; text that is made anew each time takes 100."""
    tokens = T.encode("def add(a, b):\n    return a + b  # the sum, # and nothing else\n" * 10)

    def text_alone() -> None:
        text = T.stream(True)
        for token in tokens:
            text.push((token,))

    def push_all(size: int) -> None:
        s = stream(stop=stops)
        for i in range(0, len(tokens), size):
            s.push(tokens[i : i + size])

    def make_anew() -> None:
        for i in range(len(tokens)):
            stream(stop=stops).push(tokens[:i])

    for size in (1, 8):
        assert ratio(lambda size=size: push_all(size), text_alone) < 25
    assert ratio(make_anew, text_alone, rounds=1) > 25, "mutation"
