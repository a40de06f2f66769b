"""The state behind the routes: what is loaded, what is in flight, whether new work is taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.engine import EngineDead, QueueFull, Refused
from runtime.types import InvalidRequest, Request, SamplingParams
from server.answer import REASONING
from server.decode import RequestDecoder
from server.errors import ApiError, from_invalid
from server.generation import Generation
from server.limits import Limits
from server.metrics import Metrics
from server.record import SpecDetail

if TYPE_CHECKING:
    from runtime.api import Loaded


@dataclass(slots=True)
class Service:
    """One server's state; every field is touched on the event loop only.

    loaded is None until the model is there. draining: what is in flight ends, newcomers get 503.
    """

    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    spec_detail: SpecDetail = "none"
    reasoning_names: tuple[str, ...] = REASONING  # "reasoning" as newer clients read it, or both
    loaded: Loaded | None = None
    draining: bool = False
    requests_in_flight: int = 0  # HTTP requests to /v1/ whose answer is not complete
    options: Mapping[str, object] = field(default_factory=dict)  # what the server was started with, for /server_info; no secrets
    started_s: int = field(default_factory=lambda: int(time.time()))
    generations: set[Generation] = field(default_factory=set)
    decoder: RequestDecoder = field(init=False)
    encoders: ThreadPoolExecutor = field(init=False)
    compilers: ThreadPoolExecutor = field(init=False)
    compiling: int = 0  # schemas handed to the compilers and not done

    def __post_init__(self) -> None:
        self.decoder = RequestDecoder(self.limits)
        self.encoders = ThreadPoolExecutor(1, "encode")  # one: a long prompt may wait for another, short ones never do
        self.compilers = ThreadPoolExecutor(2, "compile")

    def ready(self, model: str | None, generates: bool = True) -> Loaded:
        """What is loaded, if it can take work. Raises ApiError 503 with Retry-After, or 404 for another model's name.

        A full queue is told here to whoever wants to generate, before any prompt is encoded: a long one takes longer than a refusal may.
        """
        loaded = self.loaded
        if loaded is None:
            raise self.refused("loading", "the model is loading")
        if self.trouble() is not None:
            raise self.refused("dead", "the engine has stopped; the server is about to exit")
        if self.draining:
            raise self.refused("draining", "the server is shutting down and takes no new requests")
        if model is not None and model != loaded.name:
            raise ApiError(404, f"the model {model[:120]!r} does not exist; this server has {loaded.name!r}", "model")
        if generates and loaded.engine.full:
            raise self.refused("queue_full", "the queue is full; try again shortly")
        return loaded

    def trouble(self) -> str | None:
        """Why the engine can not go on (a failed step, or one that hangs), or None."""
        return None if self.loaded is None else self.loaded.engine.check_health()

    def refused(self, reason: str, message: str) -> ApiError:
        self.metrics.rejected(reason)
        return ApiError(503, message, headers={"retry-after": str(self.limits.retry_after_s)})

    def make_requests(
        self, loaded: Loaded, answer_id: str, prompt: Sequence[int], params: SamplingParams, salt: str | None, field: str
    ) -> list[Request]:
        """The n requests of one prompt; `field` is what the client calls the prompt. Raises ApiError 400."""
        try:
            return loaded.make_requests(answer_id, prompt, params, time.monotonic(), (salt or "").encode())
        except InvalidRequest as error:
            raise from_invalid(error, {"prompt": field}) from None

    def start(self, loaded: Loaded, requests: Sequence[Request]) -> Generation:
        """Submits the requests of one answer, all or none. Raises ApiError if the engine refuses any of them."""
        generation = Generation(loaded.engine, requests, self.limits, self.metrics)
        try:
            generation.submit()
        except QueueFull:
            raise self.refused("queue_full", "the queue is full; try again shortly") from None
        except Refused:
            raise self.refused("draining", "the server is shutting down and takes no new requests") from None
        except EngineDead:
            raise self.refused("dead", "the engine has stopped; the server is about to exit") from None
        self.metrics.admitted(requests, len(requests))
        self.generations.add(generation)
        generation.on_closed = self.generations.discard
        return generation

    async def encode_text(self, loaded: Loaded, text: str) -> list[int]:
        """Token ids of user text; long texts are encoded off the event loop, so that streams go on meanwhile."""
        if len(text) <= self.limits.inline_chars:
            return loaded.tokenizer.encode(text)
        return await asyncio.get_running_loop().run_in_executor(self.encoders, loaded.tokenizer.encode, text)
