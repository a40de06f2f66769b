"""What bench_serve measures: one answer as a Sample, from an engine in this process or over HTTP."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from runtime.types import Emission, SamplingParams
from server.client import ApiClient

if TYPE_CHECKING:
    from runtime.api import Loaded


@dataclass(slots=True)
class Sample:
    """One answer. Times are seconds since its block of requests was sent."""

    tokens: int = 0
    text: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    accepted: list[int] = field(default_factory=list)  # draft nodes accepted, one entry a speculative step
    drafted: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt with the seed of its draws: the same for every method, so that texts can be compared."""

    text: str
    seed: int
    thinking: bool = True  # before the answer, as the chat template asks for it


class Target(Protocol):
    """One method under test."""

    summary: str

    def run(self, questions: Sequence[Question], max_tokens: int, temperature: float) -> tuple[list[Sample], float]:
        """Sends the questions at once; their samples in order, and the wall time in seconds until the last has ended."""
        ...

    def close(self) -> None: ...


class EngineTarget:
    """An engine in this process: no HTTP in the figures."""

    def __init__(self, loaded: Loaded) -> None:
        self.summary = loaded.summary
        self._loaded = loaded
        self._ids = itertools.count()
        loaded.engine.start()

    def run(self, questions: Sequence[Question], max_tokens: int, temperature: float) -> tuple[list[Sample], float]:
        loaded = self._loaded
        samples = [Sample() for _ in questions]
        prompts = [loaded.template.encode([{"role": "user", "content": q.text}], thinking=q.thinking) for q in questions]
        left = threading.Semaphore(0)
        begin_s = time.perf_counter()
        for sample, prompt, question in zip(samples, prompts, questions, strict=True):
            params = SamplingParams(temperature=temperature, seed=question.seed, max_tokens=max_tokens)
            (request,) = loaded.make_requests(f"bench-{next(self._ids)}", prompt, params)
            loaded.engine.submit(request, partial(_take, sample, begin_s, left))
        for _ in samples:
            left.acquire()
        return samples, time.perf_counter() - begin_s

    def close(self) -> None:
        self._loaded.engine.shutdown(5.0)


def _take(sample: Sample, begin_s: float, left: threading.Semaphore, emission: Emission) -> None:
    now_s = time.perf_counter() - begin_s
    if emission.tokens:
        sample.first_s = sample.first_s or now_s
        sample.last_s = now_s
        sample.tokens += len(emission.tokens)
    sample.text += emission.text
    if emission.accepted is not None:
        sample.accepted.append(emission.accepted)
        sample.drafted.append(emission.drafted)
    if emission.finish is not None:
        sample.error = emission.error
        left.release()


class HttpTarget:
    """A server, as its clients see it. Acceptance needs --per-request-spec-decode-metrics detailed there."""

    def __init__(self, client: ApiClient, summary: str) -> None:
        self.summary = summary
        self._client = client

    def run(self, questions: Sequence[Question], max_tokens: int, temperature: float) -> tuple[list[Sample], float]:
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(len(questions)) as pool:
            samples = list(pool.map(lambda question: self._one(question, max_tokens, temperature, begin_s), questions))
        return samples, time.perf_counter() - begin_s

    def _one(self, question: Question, max_tokens: int, temperature: float, begin_s: float) -> Sample:
        sample = Sample()
        body = {
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "seed": question.seed,
            "chat_template_kwargs": {"thinking": question.thinking},
            "stream_options": {"include_usage": True},
        }
        for event in self._client.stream("/v1/chat/completions", body):
            _take_event(sample, event, time.perf_counter() - begin_s)
        return sample

    def close(self) -> None:
        pass


def _take_event(sample: Sample, event: dict[str, Any], now_s: float) -> None:
    for choice in event["choices"]:
        delta = choice["delta"]
        text = delta.get("reasoning_content", "") + delta.get("content", "")
        if text or choice["finish_reason"]:
            sample.first_s = sample.first_s or now_s
            sample.last_s = now_s
        sample.text += text
    if event.get("usage"):
        sample.tokens = event["usage"]["completion_tokens"]
    found = (event.get("metrics") or {}).get("speculative_decoding") or {}
    sample.accepted = found.get("per_step_accepted", sample.accepted)
    sample.drafted = found.get("per_step_drafted", sample.drafted)
