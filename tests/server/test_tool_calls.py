"""Tool calls over HTTP: streamed and whole answers agree at every split point, in the shape that clients and verifiers want."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from model.tool_parser import ToolCalls, functions_of
from runtime.stream import TextStream
from runtime.types import Emission, SamplingParams
from server.choice import ChatChoice, message_of

EOS, THINK_END, SECTION, SECTION_END, CALL, ARGS, CALL_END = 256, *range(262, 268)
MARKS = {"[/think]": THINK_END, "[s]": SECTION, "[/s]": SECTION_END, "[c]": CALL, "[a]": ARGS, "[/c]": CALL_END, "[eos]": EOS}
USER = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "b", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}},
]
CORPUS = {
    "one": 'look[/think]I will.[s][c]functions.weather:0[a]{"city": "서울 👍🏽"}[/c][/s][eos]',
    "two": '[/think][s][c]functions.weather:0[a]{"city": "X"}[/c][c]functions.b:1[a]{"x": 1}[/c][/s][eos]',
    "filler": "é[s] so [c]b:0[a]{}[/c] and [c]3[a]{}[/c] then [/s] after[eos]",
    "no ends": '[/think]né[s][c]weather:0[a]{"city": "<|tool_call_end|>"}[eos]',
    "spelled": "[/think]<|tool_calls_section_begin|><|tool_call_begin|>functions.b:0[eos]",
    "half character": '[/think][s][c]functions.b:0[a]{"x": "\udcc3[/c]',
}


def tokens_of(text: str) -> list[int]:
    out: list[int] = []
    while text:
        name = next((n for n in MARKS if text.startswith(n)), None)
        out += [MARKS[name]] if name else list(text[0].encode("utf-8", "surrogateescape"))
        text = text[len(name or "x") :]
    return out


def chunked(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    runs, at = [], 0
    for size in sizes:
        runs.append(list(tokens[at : at + size]))
        at += size
    return [run for run in [*runs, list(tokens[at:])] if run]


def run(tokenizer: Any, runs: Sequence[Sequence[int]], **sampling: Any) -> tuple[Any, ...]:
    """(message, finish, stop reason, reasoning tokens) of one choice fed with runs of tokens."""
    params = SamplingParams(**{"max_tokens": 10_000, **sampling})
    stream = TextStream(tokenizer.stream(params.skip_special_tokens), params, tokenizer.eos_ids)
    choice = ChatChoice(params, SimpleNamespace(tokenizer=tokenizer), True, ToolCalls(functions_of(TOOLS)))  # type: ignore[arg-type]
    deltas = []
    for tokens in [*runs, [EOS]]:
        pushed = stream.push(tokens)
        emission = Emission("x", tuple(tokens[: pushed.kept]), pushed.text, finish=pushed.finish, stop_reason=pushed.stop_reason)
        deltas += choice.push(emission)[0]
        if pushed.finish:
            break
    return message_of(deltas, choice.in_reasoning), choice.finish, choice.stop_reason, choice.reasoning_tokens


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stop", [(), ("}Z", "city#", " afterwards", "</think>Z")])  # held back, never complete
@pytest.mark.parametrize("text", CORPUS)
def test_every_grouping_gives_the_same_message(tokenizer: Any, text: str, stop: tuple[str, ...], skip: bool) -> None:
    tokens, rng = tokens_of(CORPUS[text]), random.Random(1)
    options = {"stop": stop, "skip_special_tokens": skip}
    whole = run(tokenizer, [tokens], **options)
    plans = [[1] * len(tokens)] + [[i] for i in range(1, len(tokens))] + [[rng.randint(1, 6) for _ in tokens] for _ in range(40)]
    for sizes in plans:
        assert run(tokenizer, chunked(tokens, sizes), **options) == whole, sizes
    assert "tool_call" not in (whole[0]["content"] or "") or text == "spelled"


@pytest.mark.parametrize("most", range(1, 60, 3))
def test_max_tokens_anywhere(tokenizer: Any, most: int) -> None:
    tokens = tokens_of(CORPUS["two"])
    whole = run(tokenizer, [tokens], max_tokens=most)
    for sizes in ([1] * len(tokens), [3] * len(tokens)):
        assert run(tokenizer, chunked(tokens, sizes), max_tokens=most) == whole
    complete = all(_parses(call["function"]["arguments"]) for call in whole[0].get("tool_calls", ()))
    assert complete or whole[1] == "length"


def _parses(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_a_stop_string_inside_arguments_ends_them(tokenizer: Any) -> None:
    message, finish, reason, _ = run(tokenizer, [tokens_of(CORPUS["one"])], stop=("서",))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (finish, reason) == ("stop", "서")


def test_one_run_ends_a_call_and_begins_another(start_server: Any) -> None:
    tokens = tokens_of(CORPUS["two"])
    script: list[list[list[int]]] = [[]]
    server = start_server(lambda _: script[0])
    want = [("functions.weather:0", "weather", '{"city": "X"}'), ("functions.b:1", "b", '{"x": 1}')]
    for at in range(1, len(tokens)):
        script[0] = [tokens[:at], tokens[at:]]
        choice = server.client.chat(tools=TOOLS)[1]["choices"][0]
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
        assert (calls, choice["finish_reason"], choice["message"]["content"]) == (want, "tool_calls", None), at
        events = server.client.events("/v1/chat/completions", messages=USER, tools=TOOLS)
        assert check_shape(events) == want, at


def check_shape(events: list[Any]) -> list[tuple[str, str, str]]:
    """The calls of a stream; everything that a verifier looks at holds."""
    choices = [event["choices"][0] for event in events[:-1]]
    assert len({event["id"] for event in events[:-1]}) == 1
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert all(value is not None for choice in choices for value in choice["delta"].values())
    calls: list[list[str]] = []
    for choice in choices:
        for piece in choice["delta"].get("tool_calls", ()):
            if len(calls) == piece["index"]:
                assert set(piece) == {"index", "id", "type", "function"} and piece["type"] == "function"
                assert set(piece["function"]) == {"name", "arguments"} and piece["function"]["arguments"] == ""
                calls.append([piece["id"], piece["function"]["name"], ""])
            else:
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                calls[piece["index"]][2] += piece["function"]["arguments"]
    return [(a, b, c) for a, b, c in calls]


def test_calls_count_on_from_the_conversation(start_server: Any) -> None:
    server = start_server(lambda _: [tokens_of('[/think][s][c]functions.weather:0[a]{"city": "X"}[/c][/s][eos]')])
    past = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": i, "type": "function", "function": {"name": "b", "arguments": "{}"}}]}
        for i in ("functions.b:0", "call_77")
    ]
    choice = server.client.chat(messages=[*USER, *past], tools=TOOLS)[1]["choices"][0]
    assert choice["message"]["tool_calls"][0]["id"] == "functions.weather:2"
    events = server.client.events("/v1/chat/completions", messages=[*USER, *past], tools=TOOLS)
    assert check_shape(events)[0][0] == "functions.weather:2"


def test_arguments_that_the_model_left_open_are_marked(start_server: Any) -> None:
    server = start_server(lambda _: [tokens_of('[/think][s][c]weather:0[a]{"city": "X[eos]')])
    choice = server.client.chat(tools=TOOLS)[1]["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "X'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "incomplete_tool_call")
    assert server.client.chat(tools=TOOLS, max_tokens=12)[1]["choices"][0]["finish_reason"] == "length"


def test_without_tools_nothing_is_parsed(start_server: Any) -> None:
    server = start_server(lambda _: [tokens_of("[/think][s][c]b:0[a]{}[/c][/s][eos]")])
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = server.client.chat(**fields)[1]["choices"][0]
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_twelve_streams_keep_their_own_state(start_server: Any) -> None:
    def script(request: Any) -> list[list[int]]:
        name = "weather" if request.seed % 2 else "b"
        return chunked(tokens_of(f'[/think][s][c]functions.{name}:0[a]{{"n": {request.seed}}}[/c][/s][eos]'), [1 + request.seed % 5] * 60)

    server = start_server(script)

    def one(seed: int) -> list[tuple[str, str, str]]:
        return check_shape(server.client.events("/v1/chat/completions", messages=USER, tools=TOOLS, seed=seed))

    with ThreadPoolExecutor(12) as pool:
        for seed, calls in enumerate(pool.map(one, range(12))):
            name = "weather" if seed % 2 else "b"
            assert calls == [(f"functions.{name}:0", name, f'{{"n": {seed}}}')]


def test_the_openai_client_reads_everything(start_server: Any) -> None:
    arguments = json.dumps({"city": "x" * 20_000})
    server = start_server(lambda _: chunked(tokens_of(f"so[/think]Hi[s][c]functions.weather:0[a]{arguments}[/c][/s][eos]"), [700] * 30))
    server.loaded.max_model_len = 40_000
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    answer = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS)  # type: ignore[arg-type]
    message = answer.choices[0].message
    assert message.tool_calls is not None and message.tool_calls[0].function.arguments == arguments  # type: ignore[union-attr]
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "Hi"
    with client.chat.completions.stream(model="fake", messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls and final.message.tool_calls[0].function.arguments == arguments
    assert final.finish_reason == "tool_calls" and final.message.content == "Hi"
