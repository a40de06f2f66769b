"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat: text, thinking and tools, whole and streamed."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive

from server.answer import json_response
from server.chat import encode_messages
from server.chat_view import renamed, run_chat, text_of
from server.errors import ApiError, bad_field, echo
from server.message_answer import error_body, events, whole
from server.message_turns import tool_choice_of, tools_of, turn
from server.protocol import ChatRequest, StreamOptions
from server.service import Service
from server.sse import EventStream

RENAME = {
    "thinking_token_budget": "thinking.budget_tokens",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    ".function.parameters": ".input_schema",
}
NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "container": ((), "there are no containers"),
    "mcp_servers": (([],), "there are no tools on the server's side"),
    "context_management": ((), "shorten the conversation before sending it"),
    "output_format": ((), "use /v1/chat/completions with response_format"),
    "output_config": ((), "use /v1/chat/completions with response_format"),
}


class CountRequest(msgspec.Struct, kw_only=True):
    """What both endpoints read. thinking: {"type": "enabled" | "adaptive" | "disabled"}; absent means disabled, as there.

    budget_tokens of thinking is held to: after so many tokens the thinking ends and the answer begins.
    """

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


async def count_tokens(service: Service, request: CountRequest, _: Receive) -> ASGIApp:
    loaded = service.ready(request.model, generates=False)
    messages, places = _messages(request)
    _budget(request)
    asked = ChatRequest(messages=messages, tools=tools_of(request.tools), chat_template_kwargs=_thinking(request))
    try:
        ids = await encode_messages(service, loaded, asked)
    except ApiError as error:
        raise renamed(error, places, RENAME) from None
    return json_response({"input_tokens": len(ids)})


async def create_message(service: Service, request: MessagesRequest, receive: Receive) -> ASGIApp:
    """The response to a request. Raises ApiError for everything that is refused."""
    messages, places = _messages(request)
    asked = ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True) if request.stream else None,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        tools=tools_of(request.tools),
        tool_choice=tool_choice_of(request.tool_choice),
        parallel_tool_calls=None if request.tool_choice is None else not request.tool_choice.get("disable_parallel_tool_use"),
        chat_template_kwargs=_thinking(request),
        thinking_token_budget=_budget(request),
    )
    answer = await run_chat(service, asked, receive, places, RENAME)
    if isinstance(answer, EventStream):
        return answer.translated(events)
    return answer if answer.status_code != 200 else whole(answer)


def error_json(error: ApiError) -> bytes:
    """Anthropic's error body, with the field beside it."""
    return msgspec.json.encode(error_body(error))


def _messages(request: CountRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as chat takes it, and the client's name of each message."""
    made, places = [], []
    if request.system:
        made.append({"role": "system", "content": text_of(request.system, "system", {"text": "text"})})
        places.append("system")
    for at, message in enumerate(request.messages):
        role, field = message.get("role"), f"messages[{at}]"
        if role not in ("user", "assistant"):
            raise bad_field(f"{field}.role", f'{echo(role)} is neither "user" nor "assistant"')
        turned = turn(role, message.get("content"), f"{field}.content")
        made += turned
        places += [field] * len(turned)
    if request.messages and request.messages[-1].get("role") == "assistant":
        raise bad_field(f"messages[{len(request.messages) - 1}].role", "an answer that has begun can not be continued; end with the user's")
    return made, places


def _thinking(request: CountRequest) -> dict[str, Any]:
    kind = "disabled" if request.thinking is None else request.thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad_field("thinking.type", f'{echo(kind)} is none of "enabled", "adaptive", "disabled"')
    return {"thinking": kind != "disabled"}


def _budget(request: CountRequest) -> int | None:
    given = None if request.thinking is None else request.thinking.get("budget_tokens")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise bad_field("thinking.budget_tokens", f"{echo(given)} is not an integer")
    return given if request.thinking and request.thinking.get("type") == "enabled" else None
