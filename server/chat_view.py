"""Other protocols as views of chat completions: their requests become a ChatRequest, its chunks become their events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from server.chat import chat
from server.errors import ApiError, bad_field, echo
from server.protocol import ChatRequest
from server.service import Service
from server.sse import EventStream

_MESSAGE = re.compile(r"messages\[(\d+)\]")


async def run_chat(
    service: Service, request: ChatRequest, receive: Receive, places: Sequence[str], rename: Mapping[str, str]
) -> Response | EventStream:
    """chat()'s answer. Errors name the client's own fields: places[i] for messages[i], `rename` for the others."""
    try:
        answer = await chat(service, request, receive)
    except ApiError as error:
        raise renamed(error, places, rename) from None
    if not isinstance(answer, (Response, EventStream)):
        raise TypeError(f"chat answered with {type(answer).__name__}")
    return answer


def renamed(error: ApiError, places: Sequence[str], rename: Mapping[str, str]) -> ApiError:
    """The error with the fields of ChatRequest turned into those that the client sent."""
    if error.param is None:
        return error

    def place(match: re.Match[str]) -> str:
        at = int(match[1])
        return places[at] if at < len(places) else "messages"

    param = rename.get(error.param) or _MESSAGE.sub(place, error.param)
    if param.startswith("tools["):
        param = param.replace(".function.parameters", rename.get(".function.parameters", ".parameters")).replace(".function.", ".")
    message = param + error.message.removeprefix(error.param) if error.message.startswith(error.param) else error.message
    return ApiError(error.status, message, param, error.headers)


async def chunks(frames: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """The chat chunks of a stream as they come; None for a keep-alive."""
    async for data in frames:
        for event in data.split(b"\n\n"):
            if event.startswith(b"data: "):
                yield msgspec.json.decode(event[6:])
            elif event.startswith(b":"):
                yield None


def reasoning_of(said: Mapping[str, Any]) -> str:
    """The reasoning of a delta or a message, under whichever name the server was told to give it."""
    return said.get("reasoning_content") or said.get("reasoning") or ""


def text_of(content: object, field: str, kinds: Mapping[str, str]) -> str:
    """The text of a content: a string, or parts whose type is a key of `kinds`, which says where the part's text stands.

    Raises ApiError 400 naming the part that is something else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(field, "want a string or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise bad_field(f"{field}[{at}].type", f"{echo(kind)} is not supported here; {' or '.join(kinds)} is")
        text = part.get(kinds[kind])
        if not isinstance(text, str):
            raise bad_field(f"{field}[{at}].{kinds[kind]}", "want a string")
        texts.append(text)
    return "".join(texts)


def event_frame(name: str, body: Mapping[str, Any]) -> bytes:
    """One named event, whose data says its name too."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode({"type": name, **body}) + b"\n\n"
