"""The output of /v1/responses: items, the response object, and the events that build it up."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.chat_view import chunks, event_frame, reasoning_of
from server.errors import ApiError, internal
from server.generation import ClientGone
from server.sse import KEEP_ALIVE

log = logging.getLogger("server")


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What a response repeats of its request."""

    fields: Mapping[str, Any]


def response(head: ResponseHead, chat: Mapping[str, Any], status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The response object; `chat` is a chat body or chunk, whose id, time and model it takes over."""
    return {
        "id": "resp_" + chat["id"].partition("-")[2],
        "object": "response",
        "created_at": chat["created"],
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": chat["model"],
        "output": output,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **head.fields,
    }


def finished(
    head: ResponseHead, chat: Mapping[str, Any], output: list[dict[str, Any]], finish: str | None, usage: Mapping[str, Any]
) -> dict[str, Any]:
    """The response at its end: completed, or incomplete where max_output_tokens or the context cut it."""
    done = response(head, chat, "incomplete" if finish == "length" else "completed", output)
    if finish == "length":
        done["incomplete_details"] = {"reason": "max_output_tokens"}
    done["usage"] = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
    return done


def output_items(chat_id: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of a whole answer: reasoning if there was any, the message, the calls."""
    serial, text = chat_id.partition("-")[2], message["content"] or ""
    made = [_item("reasoning", serial, reasoning_of(message))] if reasoning_of(message) else []
    calls = message.get("tool_calls") or ()
    if text or not (made or calls):
        made.append(_item("message", serial, text))
    return made + [_call_item(call, serial, len(made) + at, call["function"]["arguments"]) for at, call in enumerate(calls)]


def _call_item(call: Mapping[str, Any], serial: str, place: int, arguments: str, status: str = "completed") -> dict[str, Any]:
    name = call["function"]["name"]
    item = {"type": "function_call", "id": f"fc_{serial}_{place}", "call_id": call["id"], "name": name}
    return {**item, "arguments": arguments, "status": status}


def _item(kind: str, serial: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    content = [] if text is None else [_part(kind, text)]
    if kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{serial}", "summary": [], "content": content, "status": status}
    return {"type": "message", "id": f"msg_{serial}", "role": "assistant", "content": content, "status": status}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Writer:
    """Numbers events and keeps the item that is open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._number = -1
        self._kind = ""
        self._text: list[str] = []
        self._call: dict[str, Any] = {}  # of the call that is open

    def event(self, name: str, /, **body: Any) -> bytes:
        self._number += 1
        return event_frame(name, {"sequence_number": self._number, **body})

    def push(self, kind: str, serial: str, delta: str) -> list[bytes]:
        """The events for more text of a kind; the first text of a kind opens its item and closes the one before."""
        out = []
        if kind != self._kind:
            out += self.close(serial)
            self._kind, self._text = kind, []
            out.append(self.event("response.output_item.added", output_index=len(self.items), item=self._open_item(serial)))
            out.append(self.event("response.content_part.added", **self._at(serial), part=_part(kind, "")))
        self._text.append(delta)
        extra = {} if kind == "reasoning" else {"logprobs": []}
        out.append(self.event(f"response.{_part(kind, '')['type']}.delta", **self._at(serial), delta=delta, **extra))
        return out

    def call(self, piece: Mapping[str, Any], serial: str) -> list[bytes]:
        """The events for a piece of a call; the one with an id opens its item."""
        out = []
        if "id" in piece:
            out += self.close(serial)
            self._kind, self._text = "call", []
            self._call = _call_item(piece, serial, len(self.items), "", "in_progress")
            out.append(self.event("response.output_item.added", output_index=len(self.items), item=self._call))
        delta = piece["function"]["arguments"]
        if delta:
            self._text.append(delta)
            at = {"item_id": self._call["id"], "output_index": len(self.items)}
            out.append(self.event("response.function_call_arguments.delta", **at, delta=delta))
        return out

    def _close_call(self) -> list[bytes]:
        item = {**self._call, "arguments": "".join(self._text), "status": "completed"}
        at = {"item_id": item["id"], "output_index": len(self.items)}
        self._kind = ""
        self.items.append(item)
        return [
            self.event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]),
            self.event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def close(self, serial: str) -> list[bytes]:
        """The events that end the open item, if there is one."""
        if self._kind == "call":
            return self._close_call()
        if not self._kind:
            return []
        text, at = "".join(self._text), self._at(serial)
        item = _item(self._kind, serial, text)
        extra = {} if self._kind == "reasoning" else {"logprobs": []}
        out = [
            self.event(f"response.{_part(self._kind, '')['type']}.done", **at, text=text, **extra),
            self.event("response.content_part.done", **at, part=_part(self._kind, text)),
            self.event("response.output_item.done", output_index=len(self.items), item=item),
        ]
        self.items.append(item)
        self._kind = ""
        return out

    def _open_item(self, serial: str) -> dict[str, Any]:
        return _item(self._kind, serial, None, "in_progress")

    def _at(self, serial: str) -> dict[str, Any]:
        return {"item_id": _item(self._kind, serial, None)["id"], "output_index": len(self.items), "content_index": 0}


async def events_of(frames: AsyncIterator[bytes], head: ResponseHead) -> AsyncIterator[bytes]:
    """response.created … response.completed out of chat chunks; an error is an event that ends the stream."""
    writer = _Writer()
    try:
        async for event in _translated(frames, head, writer):
            yield event
    except ClientGone:
        raise
    except ApiError as error:
        yield writer.event("error", code=str(error.status), message=error.message, param=error.param)
    except Exception:
        log.exception("a stream failed")
        yield writer.event("error", code="500", message=internal().message, param=None)


async def _translated(frames: AsyncIterator[bytes], head: ResponseHead, writer: _Writer) -> AsyncIterator[bytes]:
    begun, finish = False, None
    async for chunk in chunks(frames):
        if chunk is None:
            yield KEEP_ALIVE
            continue
        serial = chunk["id"].partition("-")[2]
        if not begun:
            begun = True
            for name in ("response.created", "response.in_progress"):
                yield writer.event(name, response=response(head, chunk, "in_progress", []))
        for choice in chunk["choices"]:
            for said, kind in ((reasoning_of(choice["delta"]), "reasoning"), (choice["delta"].get("content"), "message")):
                if said:
                    yield b"".join(writer.push(kind, serial, said))
            for piece in choice["delta"].get("tool_calls", ()):
                yield b"".join(writer.call(piece, serial))
            finish = choice["finish_reason"] or finish
        if not chunk["choices"]:
            yield b"".join(writer.close(serial))
            ending = "response.incomplete" if finish == "length" else "response.completed"
            yield writer.event(ending, response=finished(head, chunk, writer.items, finish, chunk["usage"]))
