"""POST /v1/chat/completions over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

EOS, THINK_END, SECTION = 256, 262, 263
ANSWER = [[*b"let me", THINK_END], [*b"4"], [*b"2", EOS]]
USER = [{"role": "user", "content": "hi"}]


def parts(events: list[Any], index: int = 0) -> tuple[str, str]:
    deltas = [c["delta"] for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return tuple("".join(d.get(name, "") for d in deltas) for name in ("reasoning_content", "content"))  # type: ignore[return-value]


def test_reasoning_and_content_are_apart(start_server: Any) -> None:
    server = start_server(lambda _: ANSWER)
    status, body = server.client.chat()
    assert status == 200
    assert body["object"] == "chat.completion"
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "42", "reasoning_content": "let me"}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert parts(server.client.events("/v1/chat/completions", messages=USER)) == ("let me", "42")


def test_the_stream_has_the_known_form(start_server: Any) -> None:
    server = start_server(lambda _: ANSWER)
    events = server.client.events("/v1/chat/completions", messages=USER, stream_options={"include_usage": True})
    choices = [event["choices"][0] for event in events[:-2]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert sum("role" in choice["delta"] for choice in choices) == 1
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": None}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all(value is not None for choice in choices for value in choice["delta"].values()), "no null in a delta"
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events[:-1]}) == 1
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


def test_the_end_of_reasoning_may_fall_anywhere(start_server: Any) -> None:
    tokens = [*"né ".encode(), THINK_END, *b"</think> it says", EOS]
    script: list[list[list[int]]] = [[]]
    server = start_server(lambda _: script[0])
    for at in range(1, len(tokens)):
        script[0] = [tokens[:at], tokens[at:]]
        message = server.client.chat()[1]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("né ", "</think> it says"), at
        assert parts(server.client.events("/v1/chat/completions", messages=USER)) == ("né ", "</think> it says"), at


def test_reasoning_that_hits_the_cap_leaves_no_content(start_server: Any) -> None:
    server = start_server(lambda _: ANSWER)
    choice = server.client.chat(max_tokens=5)[1]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": None, "reasoning_content": "let m"}
    assert choice["finish_reason"] == "length"


def test_thinking_off_is_content_alone(start_server: Any) -> None:
    server = start_server(lambda _: [[*b"42", EOS]])
    for name in ("thinking", "enable_thinking"):
        message = server.client.chat(chat_template_kwargs={name: False})[1]["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "42"}
    assert server.client.chat(chat_template_kwargs={"thinking": True})[1]["choices"][0]["message"]["reasoning_content"] == "42"


def test_effort_is_thinking_on_or_off(start_server: Any) -> None:
    server = start_server(lambda _: [[*b"42", EOS]])
    for effort, key in (("none", "content"), ("minimal", "content"), ("low", "reasoning_content"), ("high", "reasoning_content")):
        assert server.client.chat(reasoning_effort=effort)[1]["choices"][0]["message"][key] == "42", effort
    agreed = server.client.chat(reasoning_effort="none", chat_template_kwargs={"thinking": False})
    assert agreed[1]["choices"][0]["message"]["content"] == "42"


def test_a_tool_section_ends_reasoning_and_is_content(start_server: Any) -> None:
    server = start_server(lambda _: [[*b"so", SECTION, *b"call", EOS]])
    message = server.client.chat()[1]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<|tool_calls_section_begin|>call", "reasoning_content": "so"}


def test_three_choices_stream_apart(start_server: Any) -> None:
    server = start_server(lambda request: [[97 + request.seed % 2**64], [THINK_END], [65 + request.seed], [EOS]])
    events = server.client.events("/v1/chat/completions", messages=USER, n=3, seed=0)
    assert [parts(events, index) for index in range(3)] == [("a", "A"), ("b", "B"), ("c", "C")]
    assert sum(bool(c["finish_reason"]) for e in events[:-1] for c in e["choices"]) == 3


def test_logprobs_cover_every_token(start_server: Any) -> None:
    server = start_server(lambda _: ANSWER)
    body = server.client.chat(logprobs=True, top_logprobs=2)[1]
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 10
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["l", "A"]
    assert content[0]["bytes"] == [108]
    events = server.client.events("/v1/chat/completions", messages=USER, logprobs=True, top_logprobs=2)
    streamed = [entry for e in events[:-1] for c in e["choices"] if c.get("logprobs") for entry in c["logprobs"]["content"]]
    assert streamed == content
    assert server.client.chat(logprobs=True)[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert server.client.chat()[1]["choices"][0]["logprobs"] is None


def test_tools_reach_the_template_unless_switched_off(running: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    ]
    with_tools = running.client.chat(tools=tools)[1]["usage"]["prompt_tokens"]
    for choice, more in (("auto", True), ("none", False)):
        used = running.client.chat(tools=tools, tool_choice=choice)[1]["usage"]["prompt_tokens"]
        assert (used == with_tools) is more


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"response_format": {"type": "maybe"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.triggers"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<a"]}}, "response_format.structures"),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<a"], "structures": [{"begin": "<b>"}]}},
            "response_format.structures[0].begin",
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<a"], "structures": [{"begin": "<a>", "schema": 7}]}},
            "response_format.structures[0].schema",
        ),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "reasoning_effort"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)
def test_what_is_not_served_is_named(running: Any, fields: dict[str, Any], param: str) -> None:
    status, body = running.client.chat(**fields)
    assert (status, body["error"]["param"]) == (400, param), body
    assert running.client.get("/health")[0] == 200


def test_text_formats_and_parts_pass(running: Any) -> None:
    assert running.client.chat(response_format={"type": "text"}, tool_choice="auto")[0] == 200
    message = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert running.client.chat(messages=message)[1]["choices"][0]["message"]["reasoning_content"].endswith("abassistant")


def test_control_tokens_never_come_from_a_message(running: Any) -> None:
    plain = running.client.chat(messages=[{"role": "user", "content": "x" * len("<|im_end|>")}])[1]["usage"]["prompt_tokens"]
    spelt = running.client.chat(messages=[{"role": "user", "content": "<|im_end|>"}])[1]["usage"]["prompt_tokens"]
    assert spelt == plain, "ten characters are ten byte tokens, not one control token"
