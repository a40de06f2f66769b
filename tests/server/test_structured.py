"""Structured output and forced calls over HTTP: the scripted model writes at random whatever its constraint allows."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.types import DraftTree, Request
from server.limits import Limits
from tests.schemas import conforms, random_schema

EOS, THINK_END = 256, 262
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["x"]}
CLOSED = {**PARAMETERS, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "a.b", "parameters": CLOSED}},
    {"type": "function", "function": {"name": "c", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]
OFF = {"chat_template_kwargs": {"thinking": False}}


def obedient(request: Request) -> Iterator[list[int]]:
    """Random runs of allowed tokens; ends, quotes and brackets are preferred, so that texts stay short."""
    rng = random.Random(request.seed)
    if request.constraint is None:
        yield [*b"free", EOS]
        return
    state = request.constraint.start()
    run: list[int] = []
    while True:
        nodes, masks = state.masks(DraftTree.root_only(0))
        if not len(nodes):
            yield run
            return
        free = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist()
        short = [token for token in (EOS, THINK_END, 34, 125, 93, 44) if token in free]
        token = rng.choice(short) if short and rng.random() < 0.7 else rng.choice(free)
        state.push([token])
        run.append(token)
        if rng.random() < 0.4:
            yield run
            run = []


def content_of(events: list[Any]) -> str:
    return "".join(c["delta"].get("content", "") for e in events[:-1] for c in e["choices"])


@pytest.mark.parametrize("thinking", [True, False])
def test_random_schemas(start_server: Any, thinking: bool) -> None:
    server = start_server(obedient)
    rng = random.Random(4)
    for seed in range(40):
        schema = random_schema(rng)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        fields = {"response_format": form, "seed": seed, "chat_template_kwargs": {"thinking": thinking}, "max_tokens": 3000}
        status, body = server.client.chat(**fields)
        choice = body["choices"][0]
        assert status == 200 and choice["finish_reason"] == "stop", body
        assert conforms(json.loads(choice["message"]["content"]), schema), (schema, choice)
        assert content_of(server.client.events("/v1/chat/completions", messages=USER, **fields)) == choice["message"]["content"]


def test_every_form(start_server: Any) -> None:
    server = start_server(obedient)
    for seed in range(5):
        whole = {"seed": seed, "max_tokens": 3500}

        def said(**fields: Any) -> str:
            return str(server.client.chat(**whole, **OFF, **fields)[1]["choices"][0]["message"]["content"])  # noqa: B023

        assert isinstance(json.loads(said(response_format={"type": "json_object"})), dict)
        assert isinstance(json.loads(said(structured_outputs={"json_object": True})), dict)
        assert isinstance(json.loads(said(structured_outputs={"json": {"type": "integer", "maximum": 5, "minimum": 1}})), int)
        assert said(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
        assert re.fullmatch("[a-c]{2}[0-9]", said(structured_outputs={"regex": "[a-c]{2}[0-9]"}))
        assert said(structured_outputs={"grammar": 'start: "x" | "yz"'}) in ("x", "yz")
        assert said(response_format={"type": "text"}) == "free"
        text = server.client.complete(structured_outputs={"choice": ["left", "right"]}, **whole)[1]["choices"][0]["text"]
        assert text in ("left", "right")


@pytest.mark.parametrize("thinking", [True, False])
def test_forced_calls(start_server: Any, thinking: bool) -> None:
    server = start_server(obedient)
    for seed in range(12):
        fields = {"tools": TOOLS, "seed": seed, "chat_template_kwargs": {"thinking": thinking}, "max_tokens": 3000}

        def calls(fields: dict[str, Any] = fields, **more: Any) -> list[tuple[str, Any]]:
            choice = server.client.chat(**fields, **more)[1]["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None, choice
            return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in choice["message"]["tool_calls"]]

        for name, arguments in calls(tool_choice="required"):
            assert (name == "c" and arguments == {}) or (name == "a.b" and conforms(arguments, CLOSED))
        assert len(calls(tool_choice="required", parallel_tool_calls=False)) == 1
        ((name, arguments),) = calls(tool_choice={"type": "function", "function": {"name": "a.b"}})
        assert name == "a.b" and conforms(arguments, CLOSED)


TAGS = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=a>", "schema": CLOSED, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": [1, 2]}, "end": "</f>"},
    ],
}


def tagged(request: Request) -> Iterator[list[int]]:
    """Free text, a tag's trigger, then at random whatever may follow until the tag is closed; as obedient, but in words."""
    if request.constraint is None:
        yield [*b"<f=zzz>", EOS]
        return
    state, rng = request.constraint.start(), random.Random(request.seed)
    said = bytearray()

    def say(token: int) -> None:
        state.push([token])
        said.append(token)

    for token in b"so <f=":
        say(token)
    while not said.endswith(b"</f>"):
        _, masks = state.masks(DraftTree.root_only(0))
        free = [t for t in np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist() if t < 256]
        short = [token for token in (34, 125, 93, 44) if token in free]
        say(rng.choice(short) if short and rng.random() < 0.7 else rng.choice(free))
    for token in b" done":
        say(token)
    yield [*said, EOS]


def test_structural_tags(start_server: Any) -> None:
    """What opens a tag is held to one of the structures; text around it is free."""
    server = start_server(tagged)
    seen = set()
    for seed in range(12):
        choice = server.client.chat(response_format=TAGS, seed=seed, max_tokens=3000, **OFF)[1]["choices"][0]
        found = re.fullmatch(r"so <f=([ab])>(.*)</f> done", choice["message"]["content"], re.DOTALL)
        assert found and choice["finish_reason"] == "stop", choice
        seen.add(found[1])
        assert conforms(json.loads(found[2]), CLOSED) if found[1] == "a" else json.loads(found[2]) in (1, 2)
    assert seen == {"a", "b"}
    assert server.client.chat(**OFF)[1]["choices"][0]["message"]["content"] == "<f=zzz>", "without tags nothing is held back"
    status, refused = server.client.chat(response_format=TAGS, tools=TOOLS, **OFF)
    assert (status, refused["error"]["param"]) == (400, "response_format")


def thinker(request: Request) -> Iterator[list[int]]:
    """Thinks for ever in runs of three, and does what its constraint forces."""
    state = None if request.constraint is None else request.constraint.start()
    for _ in range(200):
        run = []
        for token in b"hm ":
            nodes, masks = (np.zeros(0), None) if state is None else state.masks(DraftTree.root_only(0))
            free = (
                np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")) if len(nodes) and masks is not None else [token]
            )
            run.append(int(free[0]) if len(free) == 1 else token)
            if state is not None:
                state.push([run[-1]])
            if run[-1] == THINK_END:
                yield [*run, *b"yes", EOS]
                return
        yield run


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 10])
def test_the_thinking_budget_ends_the_reasoning(start_server: Any, budget: int) -> None:
    server = start_server(thinker)
    body = server.client.chat(thinking_token_budget=budget, max_tokens=100)[1]
    message = body["choices"][0]["message"]
    assert (message.get("reasoning_content") or "") == ("hm " * 4)[:budget] and message["content"] == "yes"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 1, "the token that ends it counts"
    asked = {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "enabled", "budget_tokens": budget}}
    parts = server.client.post("/v1/messages", asked)[1]["content"]
    assert "".join(p["text"] for p in parts if p["type"] == "text") == "yes"
    assert "".join(p["thinking"] for p in parts if p["type"] == "thinking") == ("hm " * 4)[:budget]


def test_without_a_thinking_budget_the_reasoning_goes_on(start_server: Any) -> None:
    choice = start_server(thinker).client.chat(max_tokens=100)[1]["choices"][0]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"


def test_a_choice_is_held_to_strict_declarations_only(start_server: Any) -> None:
    seen: list[Any] = []

    def script(request: Request) -> Iterator[list[int]]:
        seen.append(request.constraint)
        yield [EOS]

    server = start_server(script)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    cases = ({"tools": TOOLS}, {"tools": strict}, {"tools": TOOLS, "parallel_tool_calls": False}, {"tools": strict, "tool_choice": "none"})
    for fields in cases:
        assert server.client.chat(**fields)[0] == 200
    assert [constraint is not None for constraint in seen] == [False, True, True, False]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(parameters: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


BAD_SCHEMAS = [{"type": 7}, {"type": "string", "pattern": "["}, {"$ref": "#/$defs/none"}, deep(100)]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"tools": tool(s)}, "tools") for s in BAD_SCHEMAS]
    + [({"tools": tool(s), "tool_choice": c}, "tools") for s in BAD_SCHEMAS for c in ("required", NAMED)]
    + [({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}}, "response_format") for s in BAD_SCHEMAS]
    + [({"structured_outputs": {"json": s}}, "structured_outputs.json") for s in BAD_SCHEMAS]
    + [
        ({"tools": tool({"type": "object", "not": {}}), "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, None),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_can_not_be_held_is_named(running: Any, fields: dict[str, Any], param: str | None) -> None:
    start = time.perf_counter()
    status, body = running.client.chat(**fields)
    assert status == 400 and time.perf_counter() - start < 15, body  # cut off after compile_s, 5
    if param is not None:
        assert body["error"]["param"].startswith(param), body
    assert running.client.get("/health")[0] == 200


def test_compiling_is_cut_off_and_bounded(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(obedient, limits=Limits(compile_s=0.1, max_compiling=2))
    grammars = server.loaded.grammars
    right = type(grammars).compile

    def slow(self: Any, *rest: Any) -> Any:
        time.sleep(0.8)
        return right(self, *rest)

    monkeypatch.setattr(type(grammars), "compile", slow)
    form = {"type": "json_object"}
    status, body = server.client.chat(response_format=form)
    assert (status, body["error"]["param"]) == (400, "response_format") and "0.1 s" in body["error"]["message"]
    assert server.client.chat(response_format=form)[0] == 400
    assert server.client.chat(response_format=form)[0] == 503, "two are still being compiled"
    assert server.client.chat()[0] == 200, "other requests do not wait"
    time.sleep(1.2)
    assert server.service.compiling == 0
    monkeypatch.setattr(type(grammars), "compile", right)
    assert server.client.chat(response_format=form, max_tokens=3000)[0] == 200


class Point(pydantic.BaseModel):
    x: bool
    name: str


def test_the_openai_client_parses(start_server: Any) -> None:
    server = start_server(obedient)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    parsed = client.chat.completions.parse(model="fake", messages=USER, response_format=Point, seed=1)  # type: ignore[arg-type]
    assert isinstance(parsed.choices[0].message.parsed, Point)
    tools = [openai.pydantic_function_tool(Point)]
    called = client.chat.completions.parse(model="fake", messages=USER, tools=tools, tool_choice="required", seed=1)  # type: ignore[arg-type]
    assert isinstance((called.choices[0].message.tool_calls or [])[0].function.parsed_arguments, Point)
    with client.chat.completions.stream(
        model="fake",
        messages=USER,  # type: ignore[arg-type]
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "Point"}},
        seed=2,
    ) as stream:
        final = stream.get_final_completion().choices[0].message
    assert isinstance((final.tool_calls or [])[0].function.parsed_arguments, Point)


KEYWORDS = [
    "type",
    "properties",
    "items",
    "required",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "pattern",
    "minimum",
    "maxLength",
    "$ref",
    "$defs",
]
LEAVES = st.sampled_from(
    ["string", "object", "array", "integer", "[", "^a+$", "#", "#/$defs/a", "x", 7, -1, 2.5, 10**12, None, True, False]
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "not", "format", "a", "x-guidance"]), inner, max_size=4)
    ),
    max_leaves=12,
)
SCHEMA_LIKE = st.dictionaries(st.sampled_from(KEYWORDS), NESTED, max_size=5)
CHOICES = st.sampled_from([None, "auto", "none", "required", NAMED, {"type": "function"}, {"type": "function", "function": {"name": 3}}])


@settings(max_examples=250, deadline=5000, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(schema=SCHEMA_LIKE | NESTED, where=st.integers(0, 4), choice=CHOICES, text=st.text("ab[](){}|*+?\\:=\"' \nstart", max_size=30))
def test_nothing_that_is_sent_is_a_fault_of_the_server(running: Any, schema: Any, where: int, choice: Any, text: str) -> None:
    fields: dict[str, Any] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"regex": text}},
        {"structured_outputs": {"grammar": text}},
        {},
    ][where]
    status, body = running.client.chat(**fields, tools=tool(schema), tool_choice=choice)
    assert status in (200, 400), body
    if status == 400:
        assert body["error"]["param"] and len(body["error"]["message"]) <= 600, body
