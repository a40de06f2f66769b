"""POST /v1/completions: prompts to choices."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.types import ASGIApp, Receive

from runtime.types import Emission, Request, SamplingParams
from server.answer import Answer, check_stream_options, collect, gone_response, json_response, new_id, now
from server.errors import bad_field
from server.generation import ClientGone
from server.logprobs import CompletionLogprobs
from server.params import check_prompt_ids, fit_to_context, make_sampling
from server.protocol import CompletionRequest
from server.service import Service
from server.sse import KEEP_ALIVE, EventStream
from server.structured import constraint_of

if TYPE_CHECKING:
    from runtime.api import Loaded


class CompletionChoice:
    """Emissions of one choice to pieces {"index", "text", "logprobs", "finish_reason", "stop_reason"}."""

    def __init__(self, index: int, params: SamplingParams, loaded: Loaded, echoed: str) -> None:
        self._index = index
        self._echoed = echoed  # given once, before the first text
        self._logprobs = None if params.logprobs is None else CompletionLogprobs(loaded.tokenizer, params.logprobs, len(echoed))

    def push(self, emission: Emission) -> dict[str, Any] | None:
        """The next piece, or None where there is nothing to say yet."""
        text, self._echoed = self._echoed + emission.text, ""
        logprobs = None
        if self._logprobs is not None and emission.logprobs:
            logprobs = self._logprobs.push(emission.logprobs)
        if not text and logprobs is None and emission.finish is None:
            return None
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": emission.finish,
            "stop_reason": emission.stop_reason,
        }


async def complete(service: Service, request: CompletionRequest, receive: Receive) -> ASGIApp:
    """The response to a completion request. Raises ApiError for everything that is refused."""
    loaded, arrived_s = service.ready(request.model), time.monotonic()
    usage_at_end, usage_always = check_stream_options(request)
    params = make_sampling(request, loaded.defaults, loaded.vocab_size, max_tokens=request.max_tokens, logprobs=request.logprobs)
    if request.echo and request.logprobs is not None:
        raise bad_field("echo", "not together with logprobs: log-probabilities of the prompt are not supported")
    prompts = await encode_prompts(service, loaded, request.prompt)
    if len(prompts) * params.n > service.limits.max_choices:
        raise bad_field("n", f"{len(prompts)} prompts x n {params.n} is above {service.limits.max_choices} choices in one request")
    constraint = await constraint_of(service, loaded, request, params, False)
    answer_id = new_id("cmpl")
    requests: list[Request] = []
    choices: list[CompletionChoice] = []
    for p, (field, ids) in enumerate(prompts):
        fitted = fit_to_context(params, len(ids), loaded.max_model_len, field)
        echoed = loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=params.skip_special_tokens) if request.echo else ""
        for made in service.make_requests(loaded, f"{answer_id}-{p}", ids.tolist(), fitted, request.cache_salt, field):
            choices.append(CompletionChoice(len(requests), fitted, loaded, echoed))
            requests.append(replace(made, constraint=constraint, arrived_s=arrived_s))
    answer = Answer(
        id=answer_id,
        kind="text_completion",
        model=loaded.name,
        created=now(),
        generation=service.start(loaded, requests),
        prompts=len(prompts),
        draft_depth=loaded.draft_depth,
        spec_detail=service.spec_detail,
        usage_at_end=usage_at_end,
        usage_always=usage_always,
    )
    if request.stream:
        return EventStream(answer.generation, stream(answer, choices), service.limits)
    return await whole(answer, choices, receive)


async def stream(answer: Answer, choices: list[CompletionChoice]) -> AsyncIterator[bytes]:
    async for batch in answer.generation.batches(keep_alive=True):
        pieces = [piece for index, emission in batch if (piece := choices[index].push(emission))]
        if pieces:
            yield b"".join([answer.chunk([piece]) for piece in pieces])
        elif not batch:
            yield KEEP_ALIVE
    if answer.usage_at_end:
        yield answer.closing_chunk()


async def whole(answer: Answer, choices: list[CompletionChoice], receive: Receive) -> ASGIApp:
    joined: list[dict[str, Any]] = [{} for _ in choices]

    def take(index: int, emission: Emission) -> None:
        piece = choices[index].push(emission)
        if piece is None:
            return
        so_far = joined[index]
        if not so_far:
            joined[index] = {**piece, "text": [piece["text"]]}
            return
        so_far["text"].append(piece["text"])
        so_far["finish_reason"], so_far["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
        if piece["logprobs"] is not None:
            so_far["logprobs"] = _joined_logprobs(so_far["logprobs"], piece["logprobs"])

    try:
        await collect(answer.generation, receive, take)
    except ClientGone:
        return gone_response()
    return json_response(answer.closing([{**choice, "text": "".join(choice["text"])} for choice in joined]))


async def encode_prompts(service: Service, loaded: Loaded, prompt: str | list[Any]) -> list[tuple[str, np.ndarray]]:
    """(field name, ids [n] i32) of every prompt: text, ids, or a list of either kind.

    Raises ApiError 400 naming the entry: an empty prompt, a mixture, an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        return [("prompt", await _encode_one(service, loaded, prompt, "prompt"))]
    if not prompt:
        raise bad_field("prompt", "an empty list; send text or at least one token id")
    kind = type(prompt[0])
    if kind is not int and len(prompt) > service.limits.max_prompts:
        raise bad_field("prompt", f"{len(prompt)} prompts in one request; at most {service.limits.max_prompts}")
    for at, entry in enumerate(prompt):
        if type(entry) is not kind:
            raise bad_field(f"prompt[{at}]", f"{_kind_name(entry)} in a list that began with {_kind_name(prompt[0])}")
    if kind is int:
        return [("prompt", check_prompt_ids(prompt, loaded.vocab_size, "prompt"))]
    found = []
    for at, entry in enumerate(prompt):
        field = f"prompt[{at}]"
        ids = await _encode_one(service, loaded, entry, field) if kind is str else check_prompt_ids(entry, loaded.vocab_size, field)
        found.append((field, ids))
    return found


async def _encode_one(service: Service, loaded: Loaded, text: str, field: str) -> np.ndarray:
    if not text:
        raise bad_field(field, "an empty text; at least one token is needed")
    return np.array(await service.encode_text(loaded, text), np.int32)


def _kind_name(entry: object) -> str:
    return {int: "a token id", str: "a text", list: "a list of token ids"}[type(entry)]


def _joined_logprobs(first: dict[str, list[Any]] | None, second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return second if first is None else {key: first[key] + second[key] for key in first}
