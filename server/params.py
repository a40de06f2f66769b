"""Request fields to SamplingParams, fitted to the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.types import EXTRA_ARGS, InvalidRequest, SamplingParams
from server.errors import bad_field, echo, from_invalid
from server.protocol import GenerationFields

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "priority",
)
_EXTRA = {"extra_args": "vllm_xargs", **{f"extra_args.{name}": f"vllm_xargs.{name}" for name in EXTRA_ARGS}}


def make_sampling(
    fields: GenerationFields,
    defaults: SamplingParams,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    rename: Mapping[str, str] | None = None,
) -> SamplingParams:
    """SamplingParams of one request, every range checked; absent fields take `defaults`.

    max_tokens None means up to the context. `rename` maps SamplingParams' field names to those
    the client used (max_tokens -> max_completion_tokens). Raises ApiError 400 naming the field.
    """
    changes: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if fields.stop is not None:
        changes["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if fields.stop_token_ids is not None:
        changes["stop_token_ids"] = tuple(fields.stop_token_ids)
    if fields.logit_bias is not None:
        changes["logit_bias"] = _token_keys(fields.logit_bias)
    if fields.vllm_xargs is not None:
        changes["extra_args"] = fields.vllm_xargs
    changes["max_tokens"] = None if max_tokens is None else min(max_tokens, 2**31 - 1)
    changes["logprobs"] = logprobs
    try:
        params = defaults.replace(**changes)
        params.check_tokens(vocab_size)
    except InvalidRequest as error:
        raise from_invalid(error, {**_EXTRA, **(rename or {})}) from None
    return params


def fit_to_context(params: SamplingParams, prompt_tokens: int, max_model_len: int, field: str) -> SamplingParams:
    """The params with max_tokens clamped to the context that the prompt leaves.

    Agents send huge defaults, so a large max_tokens is no error; a prompt that leaves no room, or
    a min_tokens that can not be met, is. `field` names the prompt in the message.
    """
    left = max_model_len - prompt_tokens
    if left < 1:
        raise bad_field(field, f"{prompt_tokens} tokens, but the context holds {max_model_len}; at least one must be left to generate")
    if params.min_tokens > left:
        raise bad_field("min_tokens", f"{params.min_tokens}, but the prompt leaves {left} of the context's {max_model_len} tokens")
    return params.replace(max_tokens=left if params.max_tokens is None else min(params.max_tokens, left))


def check_prompt_ids(ids: Sequence[int], vocab_size: int, field: str) -> np.ndarray:
    """Token ids as [n] i32. Raises ApiError 400 if there is none or one lies outside the vocabulary."""
    if not ids:
        raise bad_field(field, "no token; at least one is needed")
    try:
        array = np.array(ids, np.int64)
    except OverflowError:
        array = np.array([min(max(token, -1), vocab_size) for token in ids], np.int64)
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        at = int(outside[0])
        raise bad_field(f"{field}[{at}]", f"token id {echo(ids[at])} is outside the vocabulary [0, {vocab_size})")
    return array.astype(np.int32)


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    keyed: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 12:
            raise bad_field("logit_bias", f"key {echo(key)} is not a token id")
        keyed[int(key)] = value
    return keyed
