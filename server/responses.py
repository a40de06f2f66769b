"""POST /v1/responses: OpenAI's newer form of a chat: text, reasoning and function calls, whole and streamed. Nothing is stored."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from server.answer import json_response
from server.chat_view import run_chat
from server.errors import bad_field
from server.protocol import ChatRequest, ResponseFormat, StreamOptions
from server.response_events import ResponseHead, events_of, finished, output_items
from server.response_input import messages_of, tool_choice_of, tools_of
from server.service import Service
from server.sse import EventStream

RENAME = {
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema": "text.format.schema",
    "response_format.json_schema.schema": "text.format.schema",
}
_STATE = "nothing is stored; send the whole conversation as input"
NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), _STATE),
    "conversation": ((), _STATE),
    "store": ((False,), _STATE),
    "background": ((False,), "wait for the answer, or stream it"),
    "include": (([],), "there is nothing further to include"),
    "prompt": ((), "prompt templates are not supported; use instructions and input"),
    "max_tool_calls": ((), "set parallel_tool_calls to false for one"),
    "top_logprobs": ((0,), "use /v1/chat/completions for log-probabilities"),
    "truncation": (("disabled",), "shorten the input before sending it"),
    "context_management": ((), "shorten the input before sending it"),
}


class ReasoningOptions(msgspec.Struct):
    """effort "none" or "minimal" switches thinking off; any other leaves the model as it is, which knows no degrees."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct):
    """type text, json_object or json_schema; the last with `schema`, to which the text is held."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class StreamChoices(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamChoices | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None


async def respond(service: Service, request: ResponsesRequest, receive: Receive) -> ASGIApp:
    """The response to a request. Raises ApiError for everything that is refused."""
    _check_served(request)
    messages, places = messages_of(request.input, request.instructions)
    asked = ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=tools_of(request.tools),
        tool_choice=tool_choice_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )
    answer = await run_chat(service, asked, receive, places, RENAME)
    form = TextFormat("text") if request.text is None or request.text.format is None else request.text.format
    shown = {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}
    head = ResponseHead(
        {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "metadata": request.metadata or {},
            "text": {"format": shown},
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
        }
    )
    if isinstance(answer, EventStream):
        return answer.translated(lambda frames: events_of(frames, head))
    return answer if answer.status_code != 200 else _whole(answer, head)


def _whole(answer: Response, head: ResponseHead) -> Response:
    body = msgspec.json.decode(answer.body)
    choice = body["choices"][0]
    items = output_items(body["id"], choice["message"])
    return json_response(finished(head, body, items, choice["finish_reason"], body["usage"]))


def _check_served(request: ResponsesRequest) -> None:
    """Raises ApiError 400 naming what would change the answer and is not served."""
    options = request.reasoning
    if options is not None:
        for name in ("summary", "generate_summary"):
            if getattr(options, name) is not None:
                raise bad_field(f"reasoning.{name}", "not supported; the reasoning itself is part of the output")
    if request.text is not None:
        if request.text.verbosity not in (None, "medium"):
            raise bad_field("text.verbosity", 'not supported; ask for it in the instructions, or leave it at "medium"')
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise bad_field("stream_options.include_obfuscation", "not supported; false or absent")


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    """The form of the text as chat takes it; whether it is one, chat says."""
    form = None if request.text is None else request.text.format
    if form is None:
        return None
    schema = None if form.schema is None else {"name": form.name or "answer", "schema": form.schema}
    return ResponseFormat(form.type, schema)
