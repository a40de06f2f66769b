"""What a request may say in its messages and tools, and how a bad one is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from model.chat_template import ChatTemplate
from model.messages import MAX_DEPTH, MAX_MESSAGES, TemplateError, normalise
from model.tokenizer import Tokenizer
from model.tool_parser import next_call_index

DEMO = Path(__file__).parents[2] / "model" / "demo"
T = Tokenizer.load(DEMO)
C = ChatTemplate.load(DEMO, T)


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_developer_is_system_and_foreign_ids_are_counted() -> None:
    assert C.render([{"role": "developer", "content": "S"}, *ask("u")]) == C.render([{"role": "system", "content": "S"}, *ask("u")])
    bare = {"function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_7", **bare}, bare]}
    text = C.render([calls, {"role": "assistant", "tool_calls": [bare]}])
    assert [f"functions.f:{i}<" in text for i in range(4)] == [True, True, True, False] and "call_7" not in text


def test_results_follow_the_new_ids_of_their_calls() -> None:
    def call(call_id: str, name: str) -> dict[str, Any]:
        return {"id": call_id, "function": {"name": name, "arguments": "{}"}}

    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "content": "x", "tool_call_id": call_id}

    turns = [
        *ask("u"),
        {"role": "assistant", "tool_calls": [call("functions.a:4", "a"), call("c0", "b"), call("twice", "c"), call("twice", "d")]},
        *map(result, ("twice", "c0", "functions.a:4", "twice", "never")),
        {"role": "assistant", "tool_calls": [call("c0", "e")]},  # clients count anew in every turn
        result("c0"),
    ]
    seen = normalise(turns)
    assert [c["id"] for m in seen for c in m.get("tool_calls", ())] == [
        "functions.a:4",
        "functions.b:5",
        "functions.c:6",
        "functions.d:7",
        "functions.e:8",
    ]
    results = [m["tool_call_id"] for m in seen if m["role"] == "tool"]
    assert results == ["functions.c:6", "functions.b:5", "functions.a:4", "functions.d:7", "never", "functions.e:8"]
    assert next_call_index(seen) == 9 and next_call_index(turns[:1]) == 0


def test_the_request_is_not_changed() -> None:
    messages = [
        *ask("u"),
        {"role": "user", "content": [{"type": "text", "text": "part"}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"b": [1], "a": 2}}}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    before = copy.deepcopy((messages, tools))
    harsh = ChatTemplate("{{ messages.append(1) }}{{ messages[0].clear() }}{{ tools.clear() }}{{ x.clear() }}", T)
    kwarg = {"k": 1}
    harsh.render(messages, tools=tools, x=kwarg)
    C.render(messages, tools=tools)
    assert (messages, tools) == before and kwarg == {"k": 1}


DEEP: Any = {}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages: 0 entries"),
        ("Hi", "messages: str"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), f"{MAX_MESSAGES + 1} entries"),
        (["Hi"], r"messages\[0\]: str"),
        ([{"content": "x"}], r"messages\[0\].role: None is none of user, assistant, system, developer, tool"),
        ([*ask("x"), {"role": "<|im_system|>", "content": "x"}], r"messages\[1\].role: '<\|im_system\|>'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\]: part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text: NoneType"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: part of type str"),
        ([{"role": "user", "content": "x", "name": 3}], r"messages\[0\].name: int"),
        ([{"role": "tool", "content": "x", "tool_call_id": {}}], r"tool_call_id: dict"),
        ([{"role": "assistant", "content": "x", "reasoning": []}], r"reasoning: list"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"tool_calls: dict"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function: missing"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}], r"function.name: ''"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}], r"arguments: list"),
        ([{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": {}}}]}], r"\[0\].id: int"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}], "deeper than 64"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [0] * 200_000}}}]}],
            "more than 200000 values",
        ),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": object()}}}]}], "object, which is no JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {1: 2}}}]}], "no string"),
    ],
)
def test_bad_messages_are_named(messages: Any, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        C.encode(messages)


@pytest.mark.parametrize("tools", [{"a": 1}, ["f"], [DEEP], [{"type": "function", "function": {"name": {1, 2}}}]])
def test_bad_tools_are_named(tools: Any) -> None:
    with pytest.raises(TemplateError, match="tools"):
        C.encode(ask("x"), tools=tools)
