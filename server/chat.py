"""POST /v1/chat/completions: a conversation to choices.

Tool declarations reach the template; calls that the model makes arrive as text in `content` until
the tool-call parser exists, so tool_choice may only be "auto" or "none".
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive

from model.messages import TemplateError
from model.reasoning import ReasoningSplitter, starts_in_reasoning
from runtime.types import MAX_LOGPROBS, Emission, SamplingParams
from server.answer import Answer, check_stream_options, collect, gone_response, json_response, new_id, now
from server.errors import ApiError, bad_field, echo, scrub
from server.generation import ClientGone
from server.logprobs import chat_logprobs
from server.params import fit_to_context, make_sampling
from server.protocol import ChatRequest
from server.service import Service
from server.split import ReasoningCut
from server.sse import KEEP_ALIVE, EventStream

if TYPE_CHECKING:
    from runtime.api import Loaded

_FIELD = re.compile(r"(?P<field>(?:messages|tools|chat_template_kwargs)[\w.\[\]]*): (?P<what>.*)", re.DOTALL)
_OWN_ARGUMENTS = ("self", "messages", "tools", "add_generation_prompt")


class ChatChoice:
    """Emissions of one choice to (reasoning, content, logprobs)."""

    def __init__(self, params: SamplingParams, loaded: Loaded, in_reasoning: bool) -> None:
        self._tokenizer = loaded.tokenizer
        self._logprobs = params.logprobs
        self.cut = make_cut(loaded, params.skip_special_tokens, in_reasoning)

    def push(self, emission: Emission) -> tuple[str, str, dict[str, Any] | None]:
        reasoning, content = ("", emission.text) if self.cut is None else self.cut.push(emission.tokens, emission.text)
        logprobs = None
        if self._logprobs is not None and emission.logprobs:
            logprobs = chat_logprobs(self._tokenizer, emission.logprobs, self._logprobs)
        return reasoning, content, logprobs


def make_cut(loaded: Loaded, skip_special_tokens: bool, in_reasoning: bool) -> ReasoningCut | None:
    """None where nothing needs cutting: the model has no </think>, or the prompt closed the reasoning."""
    tokenizer = loaded.tokenizer
    end = tokenizer.special.get("</think>")
    if end is None or not in_reasoning:
        return None
    section = tokenizer.special.get("<|tool_calls_section_begin|>")
    shown = {token: len(tokenizer.decode([token], skip_special_tokens)) for token in (end, section) if token is not None}
    return ReasoningCut(ReasoningSplitter(end, section, True), tokenizer.stream(skip_special_tokens), shown)


async def chat(service: Service, request: ChatRequest, receive: Receive) -> ASGIApp:
    """The response to a chat request. Raises ApiError for everything that is refused."""
    loaded = service.ready(request.model)
    usage_at_end, usage_always = check_stream_options(request)
    params = _sampling(request, loaded)
    _check_served(request)
    ids = await encode_messages(service, loaded, request)
    fitted = fit_to_context(params, len(ids), loaded.max_model_len, "messages")
    think = loaded.tokenizer.special.get("<think>")
    in_reasoning = think is not None and starts_in_reasoning(ids, think)
    answer_id = new_id("chatcmpl")
    requests = service.make_requests(loaded, answer_id, ids, fitted, request.cache_salt, "messages")
    choices = [ChatChoice(fitted, loaded, in_reasoning) for _ in requests]
    answer = Answer(
        id=answer_id,
        kind="chat.completion.chunk" if request.stream else "chat.completion",
        model=loaded.name,
        created=now(),
        generation=service.start(loaded, requests),
        prompts=1,
        draft_depth=loaded.draft_depth,
        spec_detail=service.spec_detail,
        usage_at_end=usage_at_end,
        usage_always=usage_always,
    )
    if request.stream:
        return EventStream(answer.generation, stream(answer, choices), service.limits)
    return await whole(answer, choices, receive)


async def stream(answer: Answer, choices: list[ChatChoice]) -> AsyncIterator[bytes]:
    begun = [False] * len(choices)
    async for batch in answer.generation.batches(keep_alive=True):
        frames = []
        for index, emission in batch:
            reasoning, content, logprobs = choices[index].push(emission)
            _count_reasoning(answer, choices, index)
            if not begun[index]:
                begun[index] = True
                frames.append(answer.chunk([_delta(index, {"role": "assistant", "content": ""})]))
            if reasoning or content or logprobs:
                delta = {name: text for name, text in (("reasoning_content", reasoning), ("content", content)) if text}
                frames.append(answer.chunk([_delta(index, delta, logprobs)]))
            if emission.finish is not None:
                last = _delta(index, {}) | {"finish_reason": emission.finish, "stop_reason": emission.stop_reason}
                frames.append(answer.chunk([last]))
        if frames:
            yield b"".join(frames)
        elif not batch:
            yield KEEP_ALIVE
    if answer.usage_at_end:
        yield answer.closing_chunk()


async def whole(answer: Answer, choices: list[ChatChoice], receive: Receive) -> ASGIApp:
    parts: list[tuple[list[str], list[str], list[Any]]] = [([], [], []) for _ in choices]
    ends: list[tuple[str | None, int | str | None]] = [(None, None)] * len(choices)

    def take(index: int, emission: Emission) -> None:
        reasoning, content, logprobs = choices[index].push(emission)
        _count_reasoning(answer, choices, index)
        parts[index][0].append(reasoning)
        parts[index][1].append(content)
        if logprobs is not None:
            parts[index][2].extend(logprobs["content"])
        ends[index] = (emission.finish, emission.stop_reason)

    try:
        await collect(answer.generation, receive, take)
    except ClientGone:
        return gone_response()
    made = []
    for index, (choice, (reasoning, content, logprobs)) in enumerate(zip(choices, parts, strict=True)):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        if choice.cut is not None and choice.cut.in_reasoning:
            message["content"] = None  # the answer proper never began
        finish, stop_reason = ends[index]
        made.append(
            {
                "index": index,
                "message": message,
                "logprobs": {"content": logprobs} if logprobs else None,
                "finish_reason": finish,
                "stop_reason": stop_reason,
            }
        )
    return json_response(answer.closing(made))


async def encode_messages(service: Service, loaded: Loaded, request: ChatRequest) -> list[int]:
    """Token ids of the conversation, generation prompt included. Raises ApiError 400 naming the message and field."""
    if len(request.messages) > service.limits.max_messages:
        raise bad_field("messages", f"{len(request.messages)} messages; at most {service.limits.max_messages}")
    kwargs = request.chat_template_kwargs or {}
    for name in _OWN_ARGUMENTS:
        if name in kwargs:
            raise bad_field(f"chat_template_kwargs.{name}", "set by the server itself; leave it out")
    tools = None if request.tool_choice == "none" else request.tools

    def encode() -> list[int]:
        return loaded.template.encode(request.messages, tools=tools, **kwargs)

    try:
        if _characters(request.messages, service.limits.inline_chars) + 1000 * len(tools or ()) < service.limits.inline_chars:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(service.encoders, encode)
    except TemplateError as error:
        match = _FIELD.match(str(error))
        if match:
            raise bad_field(match["field"], match["what"]) from None
        raise ApiError(400, scrub(str(error)), "messages") from None
    except RecursionError:
        raise bad_field("messages", "nested too deeply") from None


def _sampling(request: ChatRequest, loaded: Loaded) -> SamplingParams:
    max_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise bad_field("top_logprobs", "only with logprobs: true")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise bad_field("top_logprobs", f"{echo(top)} is not an integer in [0, {MAX_LOGPROBS}]")
    return make_sampling(
        request,
        loaded.defaults,
        loaded.vocab_size,
        max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        logprobs=(top or 0) if request.logprobs else None,
        rename={"max_tokens": max_name},
    )


def _check_served(request: ChatRequest) -> None:
    """Raises ApiError 400 naming what would change the answer and is not served yet."""
    if request.tool_choice not in (None, "auto", "none"):
        raise bad_field("tool_choice", f'{echo(request.tool_choice)} is not supported yet; use "auto" or "none"')
    if request.response_format is not None and request.response_format.type != "text":
        raise bad_field("response_format", f'type {echo(request.response_format.type)} is not supported yet; use "text" or leave it out')
    for at, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":
            raise bad_field(f"tools[{at}].type", f'{echo(tool.get("type"))} is not "function"')
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise bad_field(f"tools[{at}].function.name", "a non-empty string is needed")


def _count_reasoning(answer: Answer, choices: list[ChatChoice], index: int) -> None:
    cut = choices[index].cut
    if cut is not None:
        answer.generation.records[index].reasoning_tokens = cut.reasoning_tokens


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
    if logprobs is not None:
        choice["logprobs"] = logprobs
    return choice


def _characters(messages: list[dict[str, Any]], enough: int) -> int:
    """About how much text there is to encode; stops counting at `enough`."""
    total = 0
    for message in messages:
        total += 100
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            total += len(text) if isinstance(text, str) else 0
        total += 1000 * len(message.get("tool_calls") or ()) if isinstance(message.get("tool_calls"), list) else 0
        for name in ("reasoning", "reasoning_content"):
            total += len(message[name]) if isinstance(message.get(name), str) else 0
        if total >= enough:
            break
    return total
