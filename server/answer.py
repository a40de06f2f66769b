"""What both endpoints share: the identity of an answer, its usage, and the two ways to deliver it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from runtime.types import Emission
from server.errors import bad_field
from server.generation import Generation
from server.protocol import GenerationFields, Usage
from server.record import SpecDetail, speculation_of, usage_of
from server.sse import close_on_disconnect, frame

REASONING = ("reasoning_content",)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer under way: who it is, what it counts, how it closes."""

    id: str
    kind: str  # the `object` of the body; a chunk's own kind when streaming
    model: str
    created: int
    generation: Generation
    prompts: int
    draft_depth: int
    spec_detail: SpecDetail
    usage_at_end: bool = False
    usage_always: bool = False
    reasoning_names: tuple[str, ...] = REASONING  # under which the reasoning of a chat is given

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        if self.reasoning_names != REASONING:
            for choice in choices:
                said = choice.get("delta") or choice.get("message") or {}
                text = said.pop(REASONING[0], None)
                if text is not None:
                    said |= dict.fromkeys(self.reasoning_names, text)
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}

    def usage(self) -> Usage:
        return usage_of(self.generation.records, self.prompts)

    def chunk(self, choices: list[dict[str, Any]]) -> bytes:
        """One SSE frame with these choices."""
        body = self.body(choices)
        if self.usage_always:
            body["usage"] = self.usage()
        return frame(body)

    def closing_chunk(self) -> bytes:
        return frame(self.closing([]))

    def closing(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The body that carries usage, and the speculation record where the server was told to give it."""
        body = self.body(choices)
        body["usage"] = self.usage()
        if self.spec_detail != "none":
            found = speculation_of(self.generation.records, self.draft_depth, self.spec_detail)
            body["metrics"] = {"speculative_decoding": found}
        return body


def new_id(prefix: str) -> str:
    """A request id of ours; the client's X-Request-Id is only echoed."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def check_stream_options(request: GenerationFields) -> tuple[bool, bool]:
    """(usage at the end, usage in every chunk). Raises ApiError 400 if given without stream."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        raise bad_field("stream_options", "only with stream: true")
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


async def collect(generation: Generation, receive: Receive, take: Callable[[int, Emission], object]) -> None:
    """Feeds every emission to `take` until all choices end. Raises ClientGone, ApiError."""
    watcher = asyncio.create_task(close_on_disconnect(receive, generation))
    try:
        async for batch in generation.batches():
            for index, emission in batch:
                take(index, emission)
    finally:
        watcher.cancel()
        generation.close()


def json_response(body: object, status: int = 200) -> Response:
    """JSON that is always valid: msgspec writes NaN and infinities as null."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def gone_response() -> Response:
    """For a client that is no longer there; 499 only shows in the log."""
    return Response(status_code=499)
