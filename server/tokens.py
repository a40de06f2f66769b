"""POST /tokenize and /detokenize, in vLLM's form: what a text or a conversation becomes, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive

from server.answer import json_response
from server.chat import encode_messages
from server.errors import ApiError, bad_field
from server.params import check_prompt_ids
from server.protocol import ChatRequest
from server.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either prompt (a text) or messages (a conversation, as chat takes it).

    add_special_tokens is accepted and changes nothing: this model's texts begin with no token of their own.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


async def tokenize(service: Service, request: TokenizeRequest, _: Receive) -> ASGIApp:
    """{"count", "max_model_len", "tokens", "token_strs"}. Text never becomes a control token here either."""
    loaded = service.ready(request.model, generates=False)
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if request.prompt is not None:
        ids = await service.encode_text(loaded, request.prompt)
    else:
        asked = ChatRequest(messages=request.messages or [], tools=request.tools, chat_template_kwargs=request.chat_template_kwargs)
        ids = await encode_messages(service, loaded, asked)
    strings = [loaded.tokenizer.decode([token], skip_special_tokens=False) for token in ids] if request.return_token_strs else None
    return json_response({"count": len(ids), "max_model_len": loaded.max_model_len, "tokens": ids, "token_strs": strings})


async def detokenize(service: Service, request: DetokenizeRequest, _: Receive) -> ASGIApp:
    """{"prompt"}: the text of token ids, control tokens shown by name."""
    loaded = service.ready(request.model, generates=False)
    if not request.tokens:
        return json_response({"prompt": ""})
    ids = check_prompt_ids(request.tokens, loaded.vocab_size, "tokens").tolist()
    try:
        return json_response({"prompt": loaded.tokenizer.decode(ids, skip_special_tokens=False)})
    except ValueError:  # the head is wider than the vocabulary that has texts
        raise ApiError(400, "tokens: an id has no text", "tokens") from None
