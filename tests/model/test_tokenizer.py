"""The tokenizer against a slow one written from the format, the reference ids, and every way to cut a stream."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import PATTERN, RUN_CHARS, SLICE_CHARS, Tokenizer, split_long
from tests.pace import ratio

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "model" / "demo"
GOLDEN = ROOT / "tests" / "fixtures" / "golden.npz"
T = Tokenizer.load(DEMO)
BYTE = {T.token_bytes(i)[0]: i for i in range(T.vocab_size) if len(T.token_bytes(i)) == 1}  # byte → its token
SPECIALS = sorted(T.special.values())
TEXTS = [
    "I'm sure it's fine, but I can't say I'd trust that it's what we'd ship.",
    "functions.get_weather:0",
    '{"y": 1.0, "x": 2, "items": ["left", "right"]}',
    "삼겹살 👍🏽 ďábel 世界 ok",
    "漢字かなカナ ABCdef XMLHttpRequest 1234567 ...\r\n\r\n  x\t\ty   \n",
    "e\u0301 a\u0308\u0323 \u200d 👨‍👩‍👧‍👦 \x00\x7f\x85\u2028",
]


def slow_encode(text: str) -> list[int]:
    """BPE as the format states it: the whole piece if it is a token, else merge the adjacent pair of lowest rank."""
    ranks = {T.token_bytes(i): i for i in range(min(SPECIALS))}
    ids = []
    for piece in regex.findall(PATTERN, text, flags=regex.V1):
        raw = piece.encode()
        parts = [raw] if raw in ranks else [raw[i : i + 1] for i in range(len(raw))]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def slow_decode(ids: list[int], skip_special_tokens: bool = True) -> str:
    """Stretches between special tokens decoded whole."""
    text, run = "", b""
    for token in ids:
        if token < min(SPECIALS):
            run += T.token_bytes(token)
            continue
        shown = "" if skip_special_tokens and token in T.hidden else T.token_bytes(token).decode()
        text, run = text + run.decode("utf-8", "replace") + shown, b""
    return text + run.decode("utf-8", "replace")


def stream_text(ids: list[int], cuts: list[int], skip: bool = True) -> str:
    stream = T.stream(skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return "".join(stream.push(ids[a:b]) for a, b in pairwise(bounds)) + stream.flush()


# --- encoding ---


def test_pattern_has_eight_alternatives_and_reads_intersections() -> None:
    assert PATTERN.count("&&") == 4
    assert len(regex.findall(PATTERN, TEXTS[0], flags=regex.V1)) == 17
    assert regex.findall(PATTERN, "漢字ab", flags=regex.V1) == ["漢字", "ab"]
    assert regex.findall(PATTERN, "HTTPServer's 12345", flags=regex.V1) == ["HTTPServer's", " ", "123", "45"]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_slow_bpe(text: str) -> None:
    assert T.encode(text) == slow_encode(text)
    assert T.encode(text + "x") != slow_encode(text)
    assert T.decode(T.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.one_of(st.sampled_from("ab AB1'\n\r\t.世界"), st.characters(exclude_categories=("Cs",))), max_size=40))
def test_encode_equals_slow_bpe_on_any_text(text: str) -> None:
    ids = T.encode(text)
    assert ids == slow_encode(text)
    assert T.decode(ids) == text


def test_reference_ids() -> None:
    golden = np.load(GOLDEN)
    plain = golden["plain_short.ids"].tolist()
    assert T.encode("def add(a, b):\n") == plain
    for name in ("text_300", "text_1100"):
        ids = golden[f"{name}.ids"].tolist()
        assert T.encode(T.decode(ids))[: len(ids) - 1] == ids[:-1]  # the cut may fall inside the last word
    s = T.special
    ids = T.encode_pieces([s["<|im_user|>"], "user", s["<|im_middle|>"], "Hi", s["<|im_end|>"], s["<|im_assistant|>"], "assistant"])
    assert ids == golden["chat_hi.ids"].tolist()[: len(ids)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(list(T.special)), st.text(max_size=8)), max_size=8))
def test_text_never_gives_a_control_token(parts: list[str]) -> None:
    text = "".join(parts)
    assert max(T.encode(text), default=0) < min(SPECIALS)


def test_control_tokens_can_be_told_apart() -> None:
    """What the test above would see if special strings were read in text."""
    assert T._bpe.encode("a<|im_end|>", allowed_special="all")[-1] == T.special["<|im_end|>"]
    assert T.encode("a<|im_end|>")[-1] != T.special["<|im_end|>"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(SPECIALS), st.sampled_from(["the", " the", "\n", " ", "'", "s", "def", "世"])), max_size=20))
def test_pieces_join_before_bpe(pieces: list[int | str]) -> None:
    joined = "".join(piece if isinstance(piece, str) else T.token_bytes(piece).decode() for piece in pieces)
    assert T.encode_pieces(pieces) == T._bpe.encode(joined, allowed_special="all")


def test_pieces_encoded_apart_would_differ() -> None:
    assert T.encode_pieces(["re", "turn"]) == T.encode("return") != T.encode("re") + T.encode("turn")


def test_lone_surrogate_becomes_a_replacement() -> None:
    assert T.decode(T.encode("a\ud800b")) == "a\ufffdb"


# --- long text ---


def slow_split(text: str) -> list[str]:
    parts = []
    for at in range(0, max(len(text), 1), SLICE_CHARS):
        part = text[at : at + SLICE_CHARS]
        start = run = 0
        for i in range(len(part)):
            run = run + 1 if i and part[i].isspace() == part[i - 1].isspace() else 1
            if run > RUN_CHARS:
                parts.append(part[start:i])
                start, run = i, 1
        parts.append(part[start:])
    return [part for part in parts if part]


@pytest.mark.parametrize(
    "text",
    [
        "a" * (3 * RUN_CHARS),
        "a" * (RUN_CHARS + 1) + " " * (2 * RUN_CHARS + 1) + "b" * RUN_CHARS,
        ("ab " * 20_000 + "\u3000" * 30_000) * 5,
        "x" * (SLICE_CHARS - 10) + " y" * 3000,
        ("a" * RUN_CHARS + " ") * 20,
    ],
)
def test_split_long_equals_a_walk_over_characters(text: str) -> None:
    assert list(split_long(text)) == slow_split(text)
    assert list(split_long(text + "a" * (RUN_CHARS + 1))) != slow_split(text)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "世", "aB", "\n ", "a" * 24_999 + " ", " " * 24_999 + "a", "\u0301", "'s"])
def test_long_text_takes_linear_time(unit: str) -> None:
    """Without the split these take quadratic time or, for white space, overflow tiktoken's stack: a panic, no Exception."""
    text = unit * (1_600_000 // len(unit))
    assert T.decode(T.encode(text)) == text
    least = text[:50_000]
    assert ratio(lambda: T.encode(text[:400_000]), lambda: T.encode(least), rounds=1, each=3) < 24, "8 to 12; 64 where time is quadratic"


# --- decoding ---

CHARACTERS = "aé世👍🏽👨‍👩‍👧\u0301\u200d\ufffd "
IDS = st.lists(
    st.one_of(
        st.sampled_from(list(BYTE.values())),
        st.integers(0, T.vocab_size - 1),
        st.sampled_from(SPECIALS),
        st.sampled_from([BYTE[b] for b in CHARACTERS.encode()]),
    ),
    max_size=24,
)


@settings(max_examples=400, deadline=None)
@given(IDS, st.lists(st.integers(0, 24), max_size=8), st.booleans())
def test_stream_equals_decode_for_every_cut(ids: list[int], cuts: list[int], skip: bool) -> None:
    whole = T.decode(ids, skip)
    assert whole == slow_decode(ids, skip)
    assert stream_text(ids, cuts, skip) == whole
    assert stream_text(ids, list(range(len(ids))), skip) == whole


def test_every_pair_of_bytes() -> None:
    for a in range(256):
        for b in range(256):
            ids = [BYTE[0x61], BYTE[a], BYTE[b], BYTE[0x20]]
            assert stream_text(ids, [1, 2, 3]) == b"a%c%c ".replace(b"%c%c", bytes([a, b])).decode("utf-8", "replace")


@pytest.mark.parametrize("step", [1, 3])
def test_characters_across_tokens(step: int) -> None:
    text = "삼겹살 👍🏽 ďábel 世"
    ids = [BYTE[b] for b in text.encode()]
    stream = T.stream()
    deltas = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(deltas) == text and stream.flush() == ""
    assert "\ufffd" in "".join(T.decode(ids[i : i + step]) for i in range(0, len(ids), step))  # decoding each alone fails


def test_invalid_byte_and_an_end_inside_a_character() -> None:
    stream = T.stream()
    assert stream.push([BYTE[0xFF]]) == "\ufffd"
    assert stream.push([BYTE[0x20]]) == " "
    assert stream.push([BYTE[0xE4]]) == "" and stream.push([BYTE[0xB8]]) == ""
    assert stream.flush() == "\ufffd" and stream.flush() == ""
    assert stream.push([BYTE[0x96]]) == "\ufffd"  # nothing of the flushed character is left


def test_a_special_token_ends_a_broken_character() -> None:
    for name, shown in (("<|im_end|>", ""), ("</think>", "</think>")):
        stream = T.stream()
        assert stream.push([BYTE[0xE4]]) == ""
        assert stream.push([T.special[name]]) == "\ufffd" + shown


def test_what_skip_special_tokens_drops() -> None:
    kept = {name for name, token in T.special.items() if T.decode([token])}
    assert kept == {"<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"} | {
        f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end")
    }
    for name, token in T.special.items():
        assert T.decode([token], skip_special_tokens=False) == name
    assert T.special["<|reserved_token_4037|>"] == 4037 and 4037 in T.hidden


@pytest.mark.parametrize("token", [-1, T.vocab_size, 2**31])
def test_ids_outside_the_vocabulary(token: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: T.decode([0, token]),
        lambda: T.token_bytes(token),
        lambda: T.encode_pieces(["a", token]),
        lambda: T.stream().push([token]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"token id {token} is outside the vocabulary \[0, 4096\)"):
            call()


def test_a_refused_push_leaves_the_stream_as_it_was() -> None:
    stream = T.stream()
    stream.push([BYTE[0xE4]])
    with pytest.raises(ValueError):
        stream.push([BYTE[0xB8], -1])
    assert stream.push([BYTE[0xB8], BYTE[0x96]]) == "世"


def test_numpy_ids() -> None:
    ids = np.array(T.encode("Hi 世"), np.int32)
    assert T.decode(ids) == "Hi 世"
