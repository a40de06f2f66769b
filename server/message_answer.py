"""The answer of /v1/messages: a chat body or its chunks as content blocks and events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response

from server.answer import json_response
from server.chat_view import chunks, event_frame, reasoning_of
from server.choice import CUT_OFF
from server.errors import ApiError, internal
from server.generation import ClientGone

log = logging.getLogger("server")

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error body, with the field beside it."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "param": error.param}}


def whole(answer: Response) -> Response:
    """The message that a whole chat answer is."""
    body = msgspec.json.decode(answer.body)
    choice = body["choices"][0]
    message, content = choice["message"], []
    if reasoning_of(message):
        content.append({"type": "thinking", "thinking": reasoning_of(message), "signature": ""})
    calls = message.get("tool_calls") or ()
    if message["content"] or not (content or calls):
        content.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        made = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": made["name"], "input": _input(made["arguments"])})
    return json_response({**_head(body, content), **_stop(choice), "usage": _usage(body["usage"])})


async def events(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """message_start … message_stop out of chat chunks; an error is an event that ends the stream."""
    try:
        async for event in _translated(frames):
            yield event
    except ClientGone:
        raise
    except ApiError as error:
        yield event_frame("error", error_body(error))
    except Exception:
        log.exception("a stream failed")
        yield event_frame("error", error_body(internal()))


class _Blocks:
    """Opens and closes content blocks; one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def push(self, kind: str, delta: dict[str, Any]) -> list[bytes]:
        """A delta of the block of this kind, after its opening if it is another one than before."""
        empty: dict[str, Any] = {"type": kind, kind: ""}
        out = [] if kind == self._kind else self.open(kind, empty | ({"signature": ""} if kind == "thinking" else {}))
        return [*out, event_frame("content_block_delta", {"index": self._index, "delta": delta})]

    def open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        out = self.close()
        self._index, self._kind = self._index + 1, kind
        return [*out, event_frame("content_block_start", {"index": self._index, "content_block": block})]

    def close(self) -> list[bytes]:
        kind, self._kind = self._kind, ""
        return [event_frame("content_block_stop", {"index": self._index})] if kind else []

    def of(self, delta: dict[str, Any]) -> list[bytes]:
        """The events of one delta of a chat."""
        out: list[bytes] = []
        for kind, said in (("thinking", reasoning_of(delta)), ("text", delta.get("content"))):
            if said:
                out += self.push(kind, {"type": f"{kind}_delta", kind: said})
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                out += self.open("tool_use", {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
            if call["function"]["arguments"]:
                out += self.push("tool_use", {"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        return out


async def _translated(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    begun, blocks = False, _Blocks()
    async for chunk in chunks(frames):
        if chunk is None:
            yield event_frame("ping", {})
            continue
        usage = _usage(chunk["usage"])
        if not begun:
            begun = True
            start = {**_head(chunk, []), "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
            yield event_frame("message_start", {"message": start})
        for choice in chunk["choices"]:
            out = blocks.of(choice["delta"])
            if choice["finish_reason"] is not None:
                out += blocks.close()
                out.append(event_frame("message_delta", {"delta": _stop(choice), "usage": usage}))
                out.append(event_frame("message_stop", {}))
            if out:
                yield b"".join(out)


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    finish, reason = choice["finish_reason"], choice.get("stop_reason")
    if finish in ("length", "tool_calls"):
        return {"stop_reason": {"length": "max_tokens", "tool_calls": "tool_use"}[finish], "stop_sequence": None}
    if isinstance(reason, str) and reason != CUT_OFF:
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


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; what a cap has cut off, or no object, is given as it is."""
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
