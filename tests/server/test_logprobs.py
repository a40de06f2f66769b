"""Log-probabilities are valid JSON whatever the logits held, and one entry a token."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from runtime.types import TokenLogprob
from server.logprobs import LOWEST, CompletionLogprobs, chat_logprobs, token_name

INF = float("inf")


def test_names_stay_distinct_for_half_characters(tokenizer: Any) -> None:
    assert token_name(tokenizer, 97) == "a"
    assert token_name(tokenizer, 0xC3) == "bytes:\\xc3"
    assert token_name(tokenizer, 0xC4) != token_name(tokenizer, 0xC3)
    assert token_name(tokenizer, 262) == "</think>"


def test_infinities_and_nan_become_the_lowest(tokenizer: Any) -> None:
    entries = [TokenLogprob(97, -INF, (98, 99), (float("nan"), -0.1))]
    chat = chat_logprobs(tokenizer, entries, 2)
    assert json.loads(msgspec.json.encode(chat))["content"][0]["logprob"] == LOWEST
    assert [top["logprob"] for top in chat["content"][0]["top_logprobs"]] == [LOWEST, -0.1]
    assert CompletionLogprobs(tokenizer, 2).push(entries)["top_logprobs"] == [{"b": LOWEST, "c": -0.1, "a": LOWEST}]


def test_only_as_many_alternatives_as_asked_for(tokenizer: Any) -> None:
    entries = [TokenLogprob(97, -1.0, (97, 98, 99), (-1.0, -2.0, -3.0))]
    assert len(chat_logprobs(tokenizer, entries, 2)["content"][0]["top_logprobs"]) == 2
    assert chat_logprobs(tokenizer, entries, 0)["content"][0]["top_logprobs"] == []
    assert chat_logprobs(tokenizer, entries, 0)["content"][0]["bytes"] == [97]
    assert CompletionLogprobs(tokenizer, 0).push(entries)["top_logprobs"] == [{"a": -1.0}]


def test_offsets_go_on_from_call_to_call(tokenizer: Any) -> None:
    logprobs = CompletionLogprobs(tokenizer, 0, offset=5)
    assert logprobs.push([TokenLogprob(97, -1.0), TokenLogprob(0xC3, -1.0)])["text_offset"] == [5, 6]
    assert logprobs.push([TokenLogprob(98, -1.0)])["text_offset"] == [6 + len("bytes:\\xc3")]
