"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat, text and thinking, whole and streamed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from server.answer import json_response
from server.chat import encode_messages
from server.chat_view import chunks, event_frame, reasoning_of, renamed, run_chat, text_of
from server.errors import ApiError, bad_field, echo, internal
from server.generation import ClientGone
from server.protocol import ChatRequest, StreamOptions
from server.service import Service
from server.sse import EventStream

log = logging.getLogger("server")

RENAME = {"max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), "use /v1/chat/completions for tools"),
    "tool_choice": (({"type": "none"}, {"type": "auto"}), "use /v1/chat/completions for tools"),
    "container": ((), "there are no containers"),
    "mcp_servers": (([],), "there are no tools on the server's side"),
    "context_management": ((), "shorten the conversation before sending it"),
    "output_format": ((), "use /v1/chat/completions with response_format"),
    "output_config": ((), "use /v1/chat/completions with response_format"),
}


class CountRequest(msgspec.Struct, kw_only=True):
    """What both endpoints read. thinking: {"type": "enabled" | "adaptive" | "disabled"}; absent means disabled, as there.

    budget_tokens of thinking is a wish that is not enforced: max_tokens bounds thinking and answer together.
    """

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
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
    try:
        ids = await encode_messages(service, loaded, ChatRequest(messages=messages, chat_template_kwargs=_thinking(request)))
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
        chat_template_kwargs=_thinking(request),
    )
    answer = await run_chat(service, asked, receive, places, RENAME)
    if isinstance(answer, EventStream):
        return answer.translated(_events)
    return answer if answer.status_code != 200 else _whole(answer)


def error_json(error: ApiError) -> bytes:
    """Anthropic's error body, with the field beside it."""
    return msgspec.json.encode(_error_body(error))


def _error_body(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "param": error.param}}


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
        content = message.get("content")
        entry: dict[str, Any] = {"role": role}
        if role == "assistant" and isinstance(content, list):
            thoughts = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
            if thoughts:
                entry["reasoning_content"] = text_of(thoughts, f"{field}.content", {"thinking": "thinking"})
                content = [part for part in content if part not in thoughts]
        entry["content"] = text_of(content, f"{field}.content", {"text": "text"})
        made.append(entry)
        places.append(field)
    if request.messages and request.messages[-1].get("role") == "assistant":
        raise bad_field(f"messages[{len(request.messages) - 1}].role", "an answer that has begun can not be continued; end with the user's")
    return made, places


def _thinking(request: CountRequest) -> dict[str, Any]:
    kind = "disabled" if request.thinking is None else request.thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad_field("thinking.type", f'{echo(kind)} is none of "enabled", "adaptive", "disabled"')
    return {"thinking": kind != "disabled"}


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    finish, reason = choice["finish_reason"], choice.get("stop_reason")
    if finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _head(body: dict[str, Any], content: list[dict[str, Any]]) -> dict[str, Any]:
    id = "msg_" + body["id"].partition("-")[2]
    return {"id": id, "type": "message", "role": "assistant", "model": body["model"], "content": content}


def _whole(answer: Response) -> Response:
    body = msgspec.json.decode(answer.body)
    choice = body["choices"][0]
    message, content = choice["message"], []
    if reasoning_of(message):
        content.append({"type": "thinking", "thinking": reasoning_of(message), "signature": ""})
    if message["content"] or not content:
        content.append({"type": "text", "text": message["content"] or ""})
    return json_response({**_head(body, content), **_stop(choice), "usage": _usage(body["usage"])})


async def _events(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """message_start … message_stop out of chat chunks; an error is an event that ends the stream."""
    try:
        async for event in _translated(frames):
            yield event
    except ClientGone:
        raise
    except ApiError as error:
        yield event_frame("error", _error_body(error))
    except Exception:
        log.exception("a stream failed")
        yield event_frame("error", _error_body(internal()))


async def _translated(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    begun, block, kind = False, -1, ""
    async for chunk in chunks(frames):
        if chunk is None:
            yield event_frame("ping", {})
            continue
        if not begun:
            begun = True
            start = {
                **_head(chunk, []),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_usage(chunk["usage"]), "output_tokens": 0},
            }
            yield event_frame("message_start", {"message": start})
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for said, of in ((reasoning_of(delta), "thinking"), (delta.get("content"), "text")):
                if not said:
                    continue
                if kind != of:
                    if kind:
                        yield event_frame("content_block_stop", {"index": block})
                    block, kind = block + 1, of
                    empty = {"type": of, of: "", "signature": ""} if of == "thinking" else {"type": of, of: ""}
                    yield event_frame("content_block_start", {"index": block, "content_block": empty})
                yield event_frame("content_block_delta", {"index": block, "delta": {"type": f"{of}_delta", of: said}})
            if choice["finish_reason"] is not None:
                if kind:
                    yield event_frame("content_block_stop", {"index": block})
                yield event_frame("message_delta", {"delta": _stop(choice), "usage": _usage(chunk["usage"])})
                yield event_frame("message_stop", {})
