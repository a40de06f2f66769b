"""Log-probabilities in the two shapes that the two endpoints give them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from runtime.types import TokenLogprob

LOWEST = -9999.0  # stands for -inf and NaN, which JSON lacks; vLLM's value


class TokenNames(Protocol):
    def token_bytes(self, token: int) -> bytes: ...


def finite(logprob: float) -> float:
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def token_name(names: TokenNames, token: int) -> str:
    """The token's text; a token that is no valid UTF-8 by itself is spelt bytes:\\xNN, so names stay distinct."""
    raw = names.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprob], wanted: int) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs: [...]}]}; one entry for each token."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": token_name(names, token), "logprob": finite(logprob), "bytes": list(names.token_bytes(token))}

    content = []
    for entry in entries:
        top = [one(t, p) for t, p in zip(entry.rank_ids[:wanted], entry.rank_logprobs[:wanted], strict=False)]
        content.append({**one(entry.token, entry.logprob), "top_logprobs": top})
    return {"content": content}


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"} of one choice, call after call.

    text_offset counts characters of the tokens' names before each token, over the whole choice.
    """

    def __init__(self, names: TokenNames, wanted: int, offset: int = 0) -> None:
        self._names = names
        self._wanted = wanted
        self._offset = offset

    def push(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            name = token_name(self._names, entry.token)
            top = {
                token_name(self._names, t): finite(p)
                for t, p in zip(entry.rank_ids[: self._wanted], entry.rank_logprobs[: self._wanted], strict=False)
            }
            top.setdefault(name, finite(entry.logprob))  # the drawn token is always among them
            tokens.append(name)
            logprobs.append(finite(entry.logprob))
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(name)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
