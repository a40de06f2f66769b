"""One generation in progress: its tokens, how many of them are in the cache, and the pages that hold them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

import numpy as np

from runtime.adjust import SequenceHistory
from runtime.pages import first_key, page_key
from runtime.stream import Pushed
from runtime.types import I32, Emission, Request, SamplingParams


class Stream(Protocol):
    """Where a sequence's tokens become text and find their end (runtime/stream.py)."""

    def push(self, tokens: SequenceOf[int]) -> Pushed: ...

    def flush(self) -> str: ...


@runtime_checkable
class Foresees(Protocol):
    """A stream that can say what `push` of some tokens will say, all but the text, before that is made; None: not of these."""

    @property
    def ends(self) -> frozenset[int] | None:
        """Tokens that may end it before max_tokens; None: its text may. Never changes."""

    def foresee(self, tokens: SequenceOf[int]) -> Pushed | None: ...


LOG = logging.getLogger(__name__)
OnEmission = Callable[[Emission], None]
MOST_WEIGHT = 8.0  # of priorities and of a missed target, and one over it: no stream is starved of nodes


class Sequence:
    """State of one request in the engine.

    tokens [L] are prompt and output; the K/V of the first `computed` are in the cache. L - computed
    is all that tells a prompt from a decode: above 1 the sequence is due a chunk, at 1 its last token
    is the root of a draft tree. Preemption sets computed to 0 and nothing else.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        stream: Stream,
        page_size: int,
        on_emission: OnEmission | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        prompt = np.asarray(request.prompt, np.int32)
        self.request = request
        self.params = params  # max_tokens is set and fits the context
        self.stream = stream
        self.foresee = stream.foresee if isinstance(stream, Foresees) else _say_nothing
        self.ends = stream.ends if isinstance(stream, Foresees) else None
        self.on_emission = on_emission
        self.history = SequenceHistory(params, prompt, stop_ids)
        self.constraint = None if request.constraint is None else request.constraint.start()
        self.prompt_len = len(prompt)
        self.computed = 0
        self.registered = 0  # leading pages whose content other requests may read
        self.cached_tokens: int | None = None  # found in the prefix cache at first admission
        self.arrival = 0  # number in order of arrival, set by the scheduler
        self.first_token_s = 0.0  # time.monotonic() of the first output token
        self.admitted_s = 0.0  # time.monotonic() at first admission
        self.reached = 0  # the most positions that were ever computed: what a preemption takes away does not count twice
        self.preemptions = 0
        cap = params.extra_args.get("tree_budget")
        self.most_nodes = None if cap is None else int(cap)  # the request's own cap on draft nodes; None: none
        self.weighed = bool(params.extra_args or params.priority)  # `draft_weight` may be other than 1
        self.lost = False  # its stream failed while a step of it was in flight: it has been told, and goes when that step is done
        self.length = len(prompt)
        self.newest = int(prompt[-1])  # the last token
        self.page_count = 0
        self.page_edits = 0  # how often `pages` has changed
        self._page_size = page_size
        self.longest = self.prompt_len + (params.max_tokens or 0)
        self._tokens = np.empty(len(prompt) + 64, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._pages = np.zeros(len(prompt) // page_size + 8, np.int32)
        self._keys: list[bytes] = []

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def pending(self) -> int:
        """Tokens whose K/V are not in the cache; at least 1, the newest has not been through the model."""
        return self.length - self.computed

    @property
    def tokens(self) -> I32:
        return self._tokens[: self.length]

    @property
    def order(self) -> tuple[int, int]:
        """What is less is served first: the priority, then the arrival."""
        return self.params.priority, self.arrival

    def draft_weight(self, now_s: float) -> float:
        """What a token of this request is worth beside one of a request that asks for nothing.

        Its draft_weight, times 2 for each priority below 0 (halved above), times the square of mean time an output token ÷
        tpot_target_ms. Priorities and targets count 1/8 … 8 each.
        """
        if not self.weighed:
            return 1.0
        extra, priority = self.params.extra_args, self.params.priority
        weight = float(extra.get("draft_weight", 1.0)) * _within(2.0 ** min(max(-priority, -9), 9))
        target_ms = extra.get("tpot_target_ms")
        if target_ms is not None and self.output_len > 1:
            weight *= _within(((now_s - self.first_token_s) * 1e3 / (self.output_len - 1) / target_ms) ** 2)
        return weight

    @property
    def output_len(self) -> int:
        return self.length - self.prompt_len

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.longest - self.length

    def flush(self) -> str:
        """Text that the stream holds back, for an end from outside; "" if the stream fails."""
        try:
            return self.stream.flush()
        except Exception:
            LOG.exception("request %s: its text stream failed", self.id)
            return ""

    def append(self, tokens: list[int]) -> None:
        if not tokens:
            return
        if not self.first_token_s:
            self.first_token_s = time.monotonic()
        at, end = self.length, self.length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self.tokens, np.empty(max(end, at), np.int32)])
        if end - at > 8:
            self._tokens[at:end] = tokens
        else:  # 0.1 us each, where a slice takes 0.8
            for token in tokens:
                self._tokens[at] = token
                at += 1
        self.length, self.newest = end, tokens[-1]

    def gain(self, tokens: list[int]) -> None:
        """Appends what was drawn along a path; the K/V of all but the last are in the cache."""
        self.append(tokens)
        self.computed += len(tokens)

    @property
    def pages(self) -> I32:
        return self._pages[: self.page_count]

    def add_pages(self, pages: SequenceOf[int]) -> None:
        end = self.page_count + len(pages)
        if end > len(self._pages):
            self._pages = np.concatenate([self.pages, np.zeros(max(end, self.page_count), np.int32)])
        self._pages[self.page_count : end] = pages
        self.page_count = end
        self.page_edits += 1

    def cut_pages(self, keep: int) -> list[int]:
        """Drops all pages but the first `keep` from the table; returns the dropped ones."""
        dropped: list[int] = self._pages[keep : self.page_count].tolist()
        self.page_count = min(keep, self.page_count)
        self.page_edits += 1
        return dropped

    def key(self, page: int) -> bytes:
        """Prefix-cache key of a full page of tokens, 0 the first."""
        size = self._page_size
        for i in range(len(self._keys), page + 1):
            previous = self._keys[-1] if self._keys else first_key(self.request.cache_salt)
            self._keys.append(page_key(previous, self._tokens[i * size : (i + 1) * size]))
        return self._keys[page]

    def keys(self, count: int) -> list[bytes]:
        """Keys of the first `count` full pages."""
        if count:
            self.key(count - 1)
        return self._keys[:count]


def _say_nothing(tokens: SequenceOf[int]) -> Pushed | None:
    return None


def _within(weight: float) -> float:
    return min(max(weight, 1 / MOST_WEIGHT), MOST_WEIGHT)
