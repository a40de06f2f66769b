"""Prometheus metrics: vLLM's names where vLLM has one, and everything under runtime: too.

Counters of the engine are read from EngineStats at scrape time; histograms of requests are filled
on the event loop as emissions arrive. Label values come from closed sets, so that no request can
grow the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from runtime.types import Emission, Request
from server.engine_metrics import EngineCollector, StatsReader
from server.record import ChoiceRecord

Prefix = Literal["vllm", "runtime", "both"]
PREFIXES: dict[str, tuple[str, ...]] = {"vllm": ("vllm",), "runtime": ("runtime",), "both": ("vllm", "runtime")}
REJECTIONS = ("queue_full", "loading", "draining", "dead")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
VLLM = frozenset(  # the families that vLLM has; all others are under runtime: alone
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "admission_rejections",
        "corrupted_requests",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_prefill_kv_computed_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ]
)


class Metrics:
    """All metrics of one server; a generation's Observer.

    Names inside are bare (`num_requests_running`); render() puts on the prefixes and the labels
    model_name and engine, as vLLM has them.
    """

    def __init__(self, prefix: Prefix = "both") -> None:
        self._prefixes = PREFIXES[prefix]
        self._registry = CollectorRegistry(auto_describe=False)
        self._base = {"model_name": "", "engine": "0"}
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to the first token.", _SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two deliveries of one choice.", _SECONDS)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean time of a token after the first.", _SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Submission to a seat in the engine's steps.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "The seat to the first token.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to the last.", _SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "The seat to the last token.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a finished choice.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens of a finished choice.", _TOKENS)
        computed = "Prompt tokens of a finished choice that were not in the prefix cache."
        self._computed = self._histogram("request_prefill_kv_computed_tokens", computed, _TOKENS)
        longest = "Generated tokens of the longest choice of a finished request."
        self._longest = self._histogram("request_max_num_generation_tokens", longest, _TOKENS)
        self._n = self._histogram("request_params_n", "Choices of an admitted request.", (1, 2, 4, 8, 16, 32, 64, 128))
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of an admitted choice, clamped.", _TOKENS)
        self._acceptance = self._histogram(
            "request_mean_acceptance_length",
            "Tokens a speculative step of a finished choice; garbled output is very low, loops are very high.",
            tuple(1 + i / 2 for i in range(31)),
        )
        rejections = Counter("admission_rejections", "Requests refused at admission.", ("reason",), registry=self._registry)
        self._rejections = {reason: rejections.labels(reason) for reason in REJECTIONS}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def watch(self, model_name: str, read_stats: StatsReader) -> None:
        """From now on the engine's own counters are part of every scrape. Call once, when it is loaded."""
        self._base["model_name"] = model_name
        self._registry.register(EngineCollector(read_stats))

    def render(self) -> bytes:
        """The scrape, in the text format 0.0.4."""
        return generate_latest(self)  # it only calls collect()

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        for prefix in self._prefixes:
            for family in families:
                if prefix == "runtime" or family.name in VLLM:
                    yield self._renamed(family, prefix)

    def _renamed(self, family: Metric, prefix: str) -> Metric:
        renamed = Metric(f"{prefix}:{family.name}", family.documentation, family.type)
        renamed.samples = [
            sample._replace(name=f"{prefix}:{sample.name}", labels={**self._base, **sample.labels})
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
        return renamed

    def rejected(self, reason: str) -> None:
        """Counts a refusal; `reason` is one of REJECTIONS."""
        self._rejections[reason].inc()

    def admitted(self, requests: Iterable[Request], choices: int) -> None:
        self._n.observe(choices)
        for request in requests:
            self._max_tokens.observe(request.sampling.max_tokens or 0)

    def emitted(self, record: ChoiceRecord, emission: Emission, since_last_s: float | None) -> None:
        if not emission.tokens:
            return
        if since_last_s is None:
            self._ttft.observe(record.last_s - record.begun_s)
        else:
            self._itl.observe(since_last_s)

    def finished(self, record: ChoiceRecord, now_s: float) -> None:
        self._e2e.observe(now_s - record.begun_s)
        self._prompt.observe(record.prompt_tokens)
        self._generated.observe(record.completion_tokens)
        if record.admitted_s:
            self._queue.observe(max(0.0, record.admitted_s - record.submitted_s))
            self._computed.observe(record.prompt_tokens - record.cached_tokens)
        if record.admitted_s and record.first_s is not None:
            self._prefill.observe(record.first_s - record.admitted_s)
            self._inference.observe(record.last_s - record.admitted_s)
        if record.first_s is not None and record.completion_tokens > 1:
            self._decode.observe(record.last_s - record.first_s)
            self._tpot.observe((record.last_s - record.first_s) / (record.completion_tokens - 1))
        if record.accepted:
            self._acceptance.observe(1 + sum(record.accepted) / len(record.accepted))

    def ended(self, records: Sequence[ChoiceRecord]) -> None:
        """All choices of one request have ended."""
        self._longest.observe(max(record.completion_tokens for record in records))
