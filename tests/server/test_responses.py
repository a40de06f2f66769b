"""/v1/responses and /v1/messages: the official client's view of the one, the event grammar of both, refusals by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from runtime.types import Emission
from server.message_turns import turn
from server.response_input import messages_of
from tests.server.conftest import ARGUMENTS, CALL, CALL_END, SECTION, SECTION_END
from tests.server.test_structured import CLOSED, obedient

EOS, THINK_END = 256, 262
TALK: list[Any] = [{"role": "user", "content": "hi"}]


def say(*runs: list[int]) -> Any:
    return lambda _: [*runs, [EOS]]


def think_then(answer: str) -> Any:
    """Thoughts, the end of thinking in the middle of a run, an answer."""
    return say(list(b"hm"), [*b"ok", THINK_END, *answer[:2].encode()], list(answer[2:].encode()))


def named_events(server: Any, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    response = server.client.open("POST", path, {**body, "stream": True})
    assert response.status == 200, response.read()
    found = []
    for block in response.read().decode().split("\n\n"):
        if block.startswith("event: "):
            name, _, data = block.removeprefix("event: ").partition("\ndata: ")
            found.append((name, json.loads(data)))
    return found


def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10)


def test_the_official_client_reads_a_response(start_server: Any) -> None:
    server = start_server(think_then("hello"))
    made = client(server).responses.create(model="fake", input="hi", instructions="be brief", reasoning={"effort": "high"}, store=False)
    assert made.output_text == "hello" and made.status == "completed"
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output[0].content[0].text == "hmok"
    assert made.usage is not None and made.usage.output_tokens == 11 and made.usage.output_tokens_details.reasoning_tokens == 4
    again = client(server).responses.create(model="fake", input=[*made.output, {"role": "user", "content": "go on"}])
    assert again.status == "completed", "the output of one turn is the input of the next"


def test_the_official_client_streams_what_it_answers_whole(start_server: Any) -> None:
    server = start_server(think_then("hello"))
    with client(server).responses.stream(model="fake", input="hi", reasoning={"effort": "low"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "hello"
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    whole = client(server).responses.create(model="fake", input="hi", reasoning={"effort": "low"})
    strip = lambda made: [(item.type, item.content[0].text) for item in made.output]  # noqa: E731
    assert strip(final) == strip(whole) == [("reasoning", "hmok"), ("message", "hello")]


def test_response_events_are_numbered_and_closed(start_server: Any) -> None:
    server = start_server(think_then("hello"))
    events = named_events(server, "/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}})
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert all(name == body["type"] for name, body in events)
    opened = [body["output_index"] for name, body in events if name == "response.output_item.added"]
    closed = [body["output_index"] for name, body in events if name == "response.output_item.done"]
    assert opened == closed == [0, 1]
    joined = "".join(body["delta"] for name, body in events if name == "response.output_text.delta")
    assert joined == next(body["text"] for name, body in events if name == "response.output_text.done") == "hello"


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content", "reasoning")])
def test_reasoning_may_have_another_name_or_both(start_server: Any, names: tuple[str, ...]) -> None:
    server = start_server(think_then("hello"))
    server.service.reasoning_names = names
    body = {"messages": [{"role": "user", "content": "hi"}]}
    message = server.client.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert {key: message[key] for key in message if key.startswith("reasoning")} == dict.fromkeys(names, "hmok")
    assert message["content"] == "hello"
    events = server.client.events("/v1/chat/completions", **body)
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    for name in names:
        assert "".join(delta.get(name, "") for delta in deltas) == "hmok"
    assert ("reasoning_content" in names) == any("reasoning_content" in delta for delta in deltas)
    made = client(server).responses.create(model="fake", input="hi", reasoning={"effort": "high"})
    assert [item.content[0].text for item in made.output] == ["hmok", "hello"]
    history = [*body["messages"], {"role": "assistant", "content": "hello", "reasoning": "hm"}, {"role": "user", "content": "so?"}]
    assert server.client.post("/v1/chat/completions", {"messages": history})[0] == 200


@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_response_is_held_to_its_schema(start_server: Any, effort: str) -> None:
    server = start_server(obedient)
    form = {"type": "json_schema", "name": "number", "schema": CLOSED, "strict": True}
    body = {"input": "hi", "reasoning": {"effort": effort}, "text": {"format": form}}
    made = client(server).responses.create(model="fake", **body)  # type: ignore[call-overload]
    assert 0 <= json.loads(made.output_text)["x"] <= 99
    assert made.text.format.type == "json_schema"
    deltas = [event["delta"] for name, event in named_events(server, "/v1/responses", body) if name == "response.output_text.delta"]
    assert set(json.loads("".join(deltas))) == {"x"}
    any_object = {**body, "text": {"format": {"type": "json_object"}}}
    _, made = server.client.post("/v1/responses", any_object)
    assert isinstance(json.loads(made["output"][-1]["content"][0]["text"]), dict)


def test_a_cut_response_is_incomplete(start_server: Any) -> None:
    server = start_server(lambda _: [[97]] * 100)
    body = {"input": "hi", "max_output_tokens": 3, "reasoning": {"effort": "none"}}
    _, made = server.client.post("/v1/responses", body)
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][0]["content"][0]["text"] == "aaa"
    assert named_events(server, "/v1/responses", body)[-1][0] == "response.incomplete"


def test_a_message_has_anthropics_form(start_server: Any) -> None:
    server = start_server(think_then("hello"))
    body = {"max_tokens": 50, "system": "be brief", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    thinking = {**body, "thinking": {"type": "enabled", "budget_tokens": 20}}
    status, made = server.client.post("/v1/messages", thinking, x_api_key="any", anthropic_version="2023-06-01")
    assert (status, made["type"], made["role"], made["stop_reason"], made["stop_sequence"]) == (
        200,
        "message",
        "assistant",
        "end_turn",
        None,
    )
    assert [(part["type"], part.get("text") or part.get("thinking")) for part in made["content"]] == [
        ("thinking", "hmok"),
        ("text", "hello"),
    ]
    prompt = made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"]
    assert made["usage"]["output_tokens"] == 11
    counted = {key: value for key, value in thinking.items() if key != "max_tokens"}
    assert server.client.post("/v1/messages/count_tokens", counted) == (200, {"input_tokens": prompt})
    events = named_events(server, "/v1/messages", thinking)
    assert [name for name, _ in events if name != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    deltas = [body["delta"] for name, body in events if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "hello"
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hmok"
    assert events[-2][1]["usage"]["output_tokens"] == 11
    back = [*body["messages"], {"role": "assistant", "content": made["content"]}, {"role": "user", "content": "go on"}]
    assert server.client.post("/v1/messages", {**body, "messages": back})[0] == 200


def call_add(_: Any) -> Any:
    """A word, then a call that is cut in the middle of its arguments."""
    call = [SECTION, CALL, *b"functions.add:0", ARGUMENTS, *b'{"x": 1, "y": 2}', CALL_END, SECTION_END]
    return [list(b"so "), call[:25], call[25:], [EOS]]


def test_a_response_calls_functions_and_hears_of_their_results(start_server: Any) -> None:
    server = start_server(call_add)
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
    tools: Any = [{"type": "function", "name": "add", "parameters": parameters, "strict": False}]
    body: Any = {"model": "fake", "input": "hi", "tools": tools, "reasoning": {"effort": "none"}}
    made = client(server).responses.create(**body)
    assert [item.type for item in made.output] == ["message", "function_call"] and made.output_text == "so "
    call = made.output[1]
    assert (call.name, call.call_id, json.loads(call.arguments)) == ("add", "functions.add:0", {"x": 1, "y": 2})
    with client(server).responses.stream(**body) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == call.arguments and len(deltas) > 1
    assert [item.type for item in final.output] == ["message", "function_call"] and final.output[1].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    talk = [{"role": "user", "content": "hi"}, *[item.model_dump(exclude_none=True) for item in made.output], result]
    assert client(server).responses.create(**{**body, "input": talk}).status == "completed"
    messages, places = messages_of(talk, None)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"] and places == ["input[0]", "input[1]", "input[3]"]
    assert messages[1]["content"] == "so " and messages[1]["tool_calls"][0]["id"] == call.call_id


def test_a_message_calls_tools_and_hears_of_their_results(start_server: Any) -> None:
    server = start_server(call_add)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
    tools = [{"name": "add", "description": "adds", "input_schema": schema}]
    body = {"max_tokens": 200, "messages": TALK, "tools": tools, "tool_choice": {"type": "auto"}}
    status, made = server.client.post("/v1/messages", body)
    assert (status, made["stop_reason"]) == (200, "tool_use"), made
    text, call = made["content"]
    assert text == {"type": "text", "text": "so "}
    assert call == {"type": "tool_use", "id": "functions.add:0", "name": "add", "input": {"x": 1, "y": 2}}
    events = named_events(server, "/v1/messages", body)
    starts = [body["content_block"] for name, body in events if name == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use"] and starts[1] == {**call, "input": {}}
    deltas = [body["delta"] for name, body in events if name == "content_block_delta" and body["index"] == 1]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == call["input"]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    talk = [
        *TALK,
        {"role": "assistant", "content": made["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert server.client.post("/v1/messages", {**body, "messages": talk})[0] == 200
    asked = turn("user", talk[-1]["content"], "")
    assert [message["role"] for message in asked] == ["tool", "user"] and asked[0]["content"] == "3"
    more = server.client.post("/v1/messages/count_tokens", {"messages": talk, "tools": tools})[1]["input_tokens"]
    assert more > server.client.post("/v1/messages/count_tokens", {"messages": TALK, "tools": tools})[1]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["cd"]}, ("stop_sequence", "cd")),
        ({}, ("end_turn", None)),
    ],
)
def test_why_a_message_ended(start_server: Any, fields: dict[str, Any], stop: tuple[str, str | None]) -> None:
    server = start_server(say(list(b"abcdef")))
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], **fields}
    _, made = server.client.post("/v1/messages", body)
    assert (made["stop_reason"], made["stop_sequence"]) == stop
    delta = named_events(server, "/v1/messages", body)[-2][1]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == stop


IMAGE = {"type": "image", "source": {}}
REFUSED = [
    ("/v1/responses", {}, "input"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/responses", {"input": "x", "store": True}, "store"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"input": "x", "background": True}, "background"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ("/v1/responses", {"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "x"}]}, "input[0].arguments"),
    ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ("/v1/responses", {"input": "x", "truncation": "auto"}, "truncation"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "text.format.schema"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("/v1/responses", {"input": "x", "text": {"verbosity": "high"}}, "text.verbosity"),
    ("/v1/responses", {"input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "temperature": 3}, "temperature"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ("/v1/responses", {"input": [{"role": "nobody", "content": "x"}], "instructions": "y"}, "input[0].role"),
    ("/v1/messages", {"max_tokens": 5}, "messages"),
    ("/v1/messages", {"messages": TALK}, "max_tokens"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 0}, "max_tokens"),
    ("/v1/messages", {"messages": [], "max_tokens": 5}, "messages"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "tools": [{"name": ""}]}, "tools[0].name"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}], "max_tokens": 5}, "messages[0].content[0].type"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 5},
        "messages[0].content[0].tool_use_id",
    ),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "thinking": {"type": "maybe"}}, "thinking.type"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": -3}}, "thinking.budget_tokens"),
    ("/v1/messages", {"messages": [{"role": "system", "content": "x"}], "max_tokens": 5}, "messages[0].role"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 5}, "messages[0].content[0].type"),
    ("/v1/messages", {"messages": [*TALK, {"role": "assistant", "content": "so"}], "max_tokens": 5}, "messages[1].role"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("/v1/messages/count_tokens", {"messages": TALK, "thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_what_is_not_served_is_named(running: Any, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = running.client.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(param)
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert running.client.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "x"}), ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]})],
)
def test_an_error_inside_a_stream_is_an_event_of_its_protocol(start_server: Any, path: str, body: dict[str, Any]) -> None:
    server = start_server(lambda _: [[97], Emission("", (), "", finish="error", error="the model's output was not finite")])
    name, last = named_events(server, path, body)[-1]
    assert name == last["type"] == "error"
    assert "not finite" in json.dumps(last)
    assert server.client.get("/health")[0] == 200


def test_the_asynchronous_client_streams_side_by_side(start_server: Any) -> None:
    server = start_server(lambda request: [[int(token)] for token in request.prompt if token < 256])  # says its prompt again

    async def one(aclient: openai.AsyncOpenAI, number: int) -> str:
        asked: Any = [{"role": "user", "content": f"<{number}>"}]
        stream = await aclient.chat.completions.create(model="fake", messages=asked, stream=True, extra_body=INSTANT)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as aclient:
            return await asyncio.gather(*(one(aclient, number) for number in range(40)))

    assert all(f"<{number}>" in text for number, text in enumerate(asyncio.run(run())))


INSTANT = {"chat_template_kwargs": {"thinking": False}}


def test_anthropics_client_reads_messages(start_server: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    server = start_server(think_then("hello"), keys=("k1",))
    talk = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "adaptive"}}
    aclient = anthropic.Anthropic(base_url=server.url, api_key="k1", max_retries=0)
    whole = aclient.messages.create(**talk)
    with aclient.messages.stream(**talk) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "hello" and whole.stop_reason == final.stop_reason == "end_turn"
    assert [part.type for part in whole.content] == [part.type for part in final.content] == ["thinking", "text"]
    assert final.usage.output_tokens == whole.usage.output_tokens == 11
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers: not supported"):
        aclient.messages.create(**talk, extra_body={"mcp_servers": [{}]})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="k2", max_retries=0).messages.create(**talk)
