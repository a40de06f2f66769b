"""Public fault reports as HTTP requests, streamed and whole: the groups C, D, E and H of docs/cases.md that no other file covers."""

from __future__ import annotations

from typing import Any

import pytest

EOS = 256
STREAM = pytest.mark.parametrize("stream", [False, True])


def runs_of(data: bytes, size: int) -> list[list[int]]:
    return [list(data[at : at + size]) for at in range(0, len(data), size)]


def ask(server: Any, stream: bool, **fields: Any) -> tuple[str, dict[str, Any], int, list[Any]]:
    """(text, last choice, completion tokens, entries of log-probabilities) of a completion."""
    body = {"prompt": "x", "logprobs": 1, **fields}
    if not stream:
        status, whole = server.client.post("/v1/completions", body)
        assert status == 200, whole
        choice = whole["choices"][0]
        return choice["text"], choice, whole["usage"]["completion_tokens"], choice["logprobs"]["token_logprobs"]
    *chunks, done = server.client.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), choices[-1], chunks[-1]["usage"]["completion_tokens"], entries


@STREAM
@pytest.mark.parametrize("size", [1, 3, 7])
def test_characters_that_arrive_in_pieces(start_server: Any, stream: bool, size: int) -> None:  # C1
    text = "삼겹살 👍🏽 ďábel 世"
    server = start_server(lambda _: [*runs_of(text.encode(), size), [EOS]])
    got, last, tokens, _ = ask(server, stream)
    assert got == text and "\ufffd" not in got
    assert last["finish_reason"] == "stop" and tokens == len(text.encode()) + 1


@STREAM
@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a\xff b", "a\ufffd b"), ("a世".encode()[:-1], "a\ufffd"), (b"\xe4\xb8 x", "\ufffd x")],
    ids=["invalid", "cut at the end", "cut in the middle"],
)
def test_bytes_that_are_no_character(start_server: Any, stream: bool, data: bytes, text: str) -> None:  # C3
    server = start_server(lambda _: [*runs_of(data, 1), [EOS]])
    assert ask(server, stream)[0] == text


@STREAM
def test_nothing_follows_a_stop_inside_a_run(start_server: Any, stream: bool) -> None:  # D1
    server = start_server(lambda _: [[97, *b"END", *b"more"], [EOS]])
    text, last, tokens, entries = ask(server, stream, stop=["END"])
    assert (text, last["finish_reason"], last["stop_reason"]) == ("a", "stop", "END")
    assert tokens == len(entries) == 4


@STREAM
@pytest.mark.parametrize(
    ("fields", "run", "finish", "tokens"),
    [
        ({"max_tokens": 5, "stop_token_ids": [99]}, b"abcdef", "stop", 3),
        ({"max_tokens": 5, "stop": ["c"]}, b"abcdef", "stop", 3),
        ({"max_tokens": 5, "stop_token_ids": [102]}, b"abcdef", "length", 5),
        ({"max_tokens": 5, "stop": ["f"]}, b"abcdef", "length", 5),
        ({"max_tokens": 5}, [97, 98, EOS, 99, 100, 101], "stop", 3),
        ({"max_tokens": 3}, [97, 98, EOS, 99, 100, 101], "stop", 3),
        ({"max_tokens": 2}, [97, 98, EOS, 99, 100, 101], "length", 2),
    ],
)
def test_stop_or_cap_whichever_comes_first(  # D2
    start_server: Any, stream: bool, fields: dict[str, Any], run: Any, finish: str, tokens: int
) -> None:
    server = start_server(lambda _: [list(run), list(run)])
    _, last, counted, entries = ask(server, stream, **fields)
    assert (last["finish_reason"], counted, len(entries)) == (finish, tokens, tokens)


@STREAM
@pytest.mark.parametrize("most", [1, 5, 8, 10])
def test_the_cap_holds_in_text_usage_logprobs_and_metrics(start_server: Any, stream: bool, most: int) -> None:  # D4
    server = start_server(lambda _: [[97] * 5] * 10)
    text, last, tokens, entries = ask(server, stream, max_tokens=most)
    assert (text, last["finish_reason"], tokens, len(entries)) == ("a" * most, "length", most, most)
    assert server.client.metric("vllm:generation_tokens_total") == most
    assert server.client.metric("vllm:request_generation_tokens_sum") == most


@STREAM
@pytest.mark.parametrize(
    ("runs", "text", "finish"),
    [
        ([b"go E", b"ND", b"!"], "go ", "stop"),
        ([b"go E", b"ND!"], "go ", "stop"),
        ([b"go EN", b"X"], "go ENX", "stop"),
        ([b"go E", b"ND"], "go END", "stop"),
    ],
)
def test_held_text_is_released_or_dropped_whole(  # D6
    start_server: Any, stream: bool, runs: list[bytes], text: str, finish: str
) -> None:
    server = start_server(lambda _: [*[list(run) for run in runs], [EOS]])
    got, last, *_ = ask(server, stream, stop=["END!"])
    assert (got, last["finish_reason"]) == (text, finish)
    assert last["stop_reason"] == (None if text.endswith(("X", "END")) else "END!") or isinstance(last["stop_reason"], int)


@STREAM
def test_forbidden_alternatives_are_valid_json(start_server: Any, stream: bool) -> None:  # E1
    server = start_server(lambda _: [[97, 98], [EOS]])  # the second alternative of every token is at minus infinity
    body = {"prompt": "x", "logprobs": 5, "logit_bias": {"65": -100}}
    if stream:
        tops = [
            c["logprobs"]["top_logprobs"] for e in server.client.events("/v1/completions", **body) if e != "[DONE]" for c in e["choices"]
        ]
        first = tops[0][0]
    else:
        first = server.client.post("/v1/completions", body)[1]["choices"][0]["logprobs"]["top_logprobs"][0]
    assert first == {"a": -0.5, "A": -9999.0}


def test_a_thousand_ends_leave_no_abort_and_no_object(start_server: Any) -> None:  # H2
    server = start_server(lambda _: [[97], [EOS]])
    for i in range(1000):
        assert server.client.complete(stream=i % 2 == 1)[0] == 200
    assert server.engine.aborted == [] and not server.service.generations
    assert server.client.metric("vllm:e2e_request_latency_seconds_count") == 1000


@STREAM
@pytest.mark.parametrize("spelt", ["<think>a</think>b", "</think>", "<|im_end|><|tool_calls_section_begin|>x"])
@pytest.mark.parametrize("thinking", [False, True])
def test_markers_spelled_in_ordinary_tokens_stay_text(start_server: Any, stream: bool, spelt: str, thinking: bool) -> None:  # B3
    server = start_server(lambda _: [*runs_of(spelt.encode(), 3), [EOS]])
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"thinking": thinking}}
    if stream:
        deltas = [c["delta"] for e in server.client.events("/v1/chat/completions", **body) if e != "[DONE]" for c in e["choices"]]
        message = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content")}
    else:
        message = server.client.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
    said, silent = ("reasoning_content", "content") if thinking else ("content", "reasoning_content")
    assert message[said] == spelt and not message.get(silent)
