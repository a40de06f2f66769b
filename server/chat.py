"""POST /v1/chat/completions: a conversation to choices."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp, Receive

from model.messages import TemplateError
from model.reasoning import starts_in_reasoning
from model.tool_parser import ToolCalls, functions_of, next_call_index
from runtime.types import MAX_LOGPROBS, Emission, SamplingParams
from server.answer import Answer, check_stream_options, collect, gone_response, json_response, new_id, now
from server.choice import ChatChoice, Delta, message_of
from server.errors import ApiError, bad_field, echo, scrub
from server.generation import ClientGone
from server.params import fit_to_context, make_sampling
from server.protocol import EFFORTS, ChatRequest
from server.service import Service
from server.sse import KEEP_ALIVE, EventStream
from server.structured import calls_tools, check_tools, constraint_of, with_thinking_bound

if TYPE_CHECKING:
    from runtime.api import Loaded

_FIELD = re.compile(r"(?P<field>(?:messages|tools|chat_template_kwargs)[\w.\[\]]*): (?P<what>.*)", re.DOTALL)
_OWN_ARGUMENTS = ("self", "messages", "tools", "add_generation_prompt")


async def chat(service: Service, request: ChatRequest, receive: Receive) -> ASGIApp:
    """The response to a chat request. Raises ApiError for everything that is refused."""
    loaded, arrived_s = service.ready(request.model), time.monotonic()
    usage_at_end, usage_always = check_stream_options(request)
    params = _sampling(request, loaded)
    check_tools(request)
    request = msgspec.structs.replace(request, chat_template_kwargs=template_options(request))
    ids = await encode_messages(service, loaded, request)
    fitted = fit_to_context(params, len(ids), loaded.max_model_len, "messages")
    think = loaded.tokenizer.special.get("<think>")
    in_reasoning = think is not None and starts_in_reasoning(ids, think)
    answer_id = new_id("chatcmpl")
    constraint = await constraint_of(service, loaded, request, fitted, in_reasoning)
    constraint = with_thinking_bound(loaded, request, in_reasoning, constraint)
    made = service.make_requests(loaded, answer_id, ids, fitted, request.cache_salt, "messages")
    requests = [replace(one, constraint=constraint, arrived_s=arrived_s) for one in made]
    first_call = next_call_index(request.messages)
    choices = [ChatChoice(fitted, loaded, in_reasoning, _calls(request, first_call)) for _ in requests]
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
        reasoning_names=service.reasoning_names,
    )
    if request.stream:
        return EventStream(answer.generation, stream(answer, choices), service.limits)
    return await whole(answer, choices, receive)


async def stream(answer: Answer, choices: list[ChatChoice]) -> AsyncIterator[bytes]:
    begun = [False] * len(choices)
    async for batch in answer.generation.batches(keep_alive=True):
        frames = []
        for index, emission in batch:
            choice = choices[index]
            deltas, logprobs = choice.push(emission)
            answer.generation.records[index].reasoning_tokens = choice.reasoning_tokens
            if not begun[index]:
                begun[index] = True
                frames.append(answer.chunk([_delta(index, {"role": "assistant", "content": ""})]))
            for delta in deltas or ([{}] if logprobs else []):
                frames.append(answer.chunk([_delta(index, delta, logprobs)]))
                logprobs = None  # once, with the first
            if emission.finish is not None:
                last = _delta(index, {}) | {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}
                frames.append(answer.chunk([last]))
        if frames:
            yield b"".join(frames)
        elif not batch:
            yield KEEP_ALIVE
    if answer.usage_at_end:
        yield answer.closing_chunk()


async def whole(answer: Answer, choices: list[ChatChoice], receive: Receive) -> ASGIApp:
    deltas: list[list[Delta]] = [[] for _ in choices]
    logprobs: list[list[Any]] = [[] for _ in choices]

    def take(index: int, emission: Emission) -> None:
        more, of_tokens = choices[index].push(emission)
        answer.generation.records[index].reasoning_tokens = choices[index].reasoning_tokens
        deltas[index] += more
        if of_tokens is not None:
            logprobs[index].extend(of_tokens["content"])

    try:
        await collect(answer.generation, receive, take)
    except ClientGone:
        return gone_response()
    made = [
        {
            "index": index,
            "message": message_of(deltas[index], choice.in_reasoning),
            "logprobs": {"content": logprobs[index]} if logprobs[index] else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        for index, choice in enumerate(choices)
    ]
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


def template_options(request: ChatRequest) -> dict[str, Any]:
    """chat_template_kwargs with reasoning_effort among them. Raises ApiError 400 where the two contradict each other."""
    kwargs, effort = dict(request.chat_template_kwargs or {}), request.reasoning_effort
    if effort is None:
        return kwargs
    if effort not in EFFORTS:
        raise bad_field("reasoning_effort", f"{echo(effort)} is none of {', '.join(EFFORTS)}")
    thinking = effort not in ("none", "minimal")
    for name in ("thinking", "enable_thinking"):
        if kwargs.setdefault(name, thinking) is not thinking:
            raise bad_field("reasoning_effort", f"{echo(effort)} together with chat_template_kwargs.{name} {echo(kwargs[name])}; give one")
    return kwargs


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


def _calls(request: ChatRequest, first: int) -> ToolCalls | None:
    """What collects the calls of one choice; None where the request declares nothing to call."""
    if not calls_tools(request):
        return None
    return ToolCalls(functions_of(request.tools or ()), first)


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
