"""A server over a scripted engine: the requests say what the model answers, so every token is known."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from model.chat_template import ChatTemplate
from model.grammar import GrammarCompiler
from model.tokenizer import Tokenizer
from runtime.engine import QueueFull
from runtime.stats import EngineStats
from runtime.stream import TextStream
from runtime.types import Emission, InvalidRequest, Request, SamplingParams, TokenLogprob
from server.lifecycle import HttpServer, ServeOptions
from server.limits import Limits
from server.metrics import Metrics
from server.service import Service

SPECIALS = [
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
EOS, IM_END, THINK, THINK_END, SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END = 256, 257, *range(261, 268)
TEMPLATE = (
    "{%- if tools -%}<|im_user|>tools<|im_middle|>{{ tools_ts_str or (tools | tojson) }}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}<|im_user|>{{ m.role }}<|im_middle|>"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content or [] -%}{{ p.text }}{%- endfor -%}{%- endif -%}"
    "<|im_end|>{%- endfor -%}<|im_assistant|>assistant<|im_middle|><think>{%- if not thinking -%}</think>{%- endif -%}"
)

Script = Callable[[Request], Iterable[Sequence[int] | Emission]]


def make_tokenizer() -> Tokenizer:
    """Bytes 0..255, then the specials; think tags and tool markers are shown, as Kimi's are."""
    special = {name: 256 + i for i, name in enumerate(SPECIALS)}
    return Tokenizer([bytes([i]) for i in range(256)], special, frozenset({EOS, IM_END, 258, 259, 260}), frozenset({EOS, IM_END}))


@dataclass(slots=True)
class _Live:
    request: Request
    runs: Iterator[Sequence[int] | Emission]
    text: TextStream
    on_emission: Callable[[Emission], None]


class ScriptedEngine:
    """Gives each request the runs of tokens that `script` says, one run a step, as the real engine would deliver them.

    A run longer than one token counts as a speculative step that accepted all but its last.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self.script = script
        self.step_s = 0.0
        self.dead = False
        self.max_waiting = 64
        self.max_running = 32
        self.aborted: list[str] = []
        self.gate = threading.Event()  # cleared: no step is made
        self.gate.set()
        self._tokenizer = tokenizer
        self._stats = EngineStats(pages_total=100)
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def shutdown(self, timeout_s: float = 0.0) -> None:
        self._closing = True
        self.gate.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def stats(self) -> EngineStats:
        with self._lock:
            self._stats.running = len(self._live)
            self._stats.pages_used = len(self._live)
            return self._stats.copy()

    def check_health(self) -> str | None:
        return "the engine has failed: no /srv/models/config.json" if self.dead else None

    @property
    def full(self) -> bool:
        return len(self._live) >= self.max_running + self.max_waiting

    def check(self, request: Request) -> None:
        if len(request.prompt) > 4000:
            raise InvalidRequest("prompt", "more pages than there are")

    def submit(self, request: Request, on_emission: Callable[[Emission], None]) -> None:
        with self._lock:
            if len(self._live) >= self.max_running + self.max_waiting:
                self._stats.rejected += 1
                raise QueueFull(f"{len(self._live)} requests")
            text = TextStream(self._tokenizer.stream(request.sampling.skip_special_tokens), request.sampling, self._tokenizer.eos_ids)
            self._live[request.id] = _Live(request, iter(self.script(request)), text, on_emission)
            self._stats.prompt_tokens += len(request.prompt)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            if self._live.pop(request_id, None) is not None:
                self._stats.finished["abort"] += 1

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(0.5)
            self._wake.clear()
            while self._live and not self._closing and not self.dead:
                self.gate.wait()
                if self.step_s:
                    time.sleep(self.step_s)
                with self._lock:
                    live = list(self._live.values())
                for one in live:
                    self._step(one)

    def _step(self, live: _Live) -> None:
        emission = self._emission(live)
        with self._lock:
            if live.request.id not in self._live:
                return
            self._stats.generation_tokens += len(emission.tokens)
            if emission.finish is not None:
                del self._live[live.request.id]
                self._stats.finished[emission.finish] += 1
        live.on_emission(emission)

    def _emission(self, live: _Live) -> Emission:
        run = next(live.runs, (EOS,))
        if isinstance(run, Emission):
            return Emission(live.request.id, run.tokens, run.text, finish=run.finish, error=run.error)
        pushed = live.text.push(run)
        tokens = tuple(run[: pushed.kept])
        logprobs = None
        if live.request.sampling.logprobs is not None:
            top = live.request.sampling.logprobs
            logprobs = tuple(TokenLogprob(t, -0.5, (t, 65)[:top], (-0.5, float("-inf"))[:top]) for t in tokens)
        speculative = (len(run) - 1, 8) if len(run) > 1 else (None, 0)
        return Emission(live.request.id, tokens, pushed.text, logprobs, pushed.finish, pushed.stop_reason, None, 3, *speculative)


@dataclass(slots=True)
class FakeLoaded:
    engine: ScriptedEngine
    tokenizer: Tokenizer
    template: ChatTemplate
    name: str = "fake"
    max_model_len: int = 4096
    vocab_size: int = 268
    draft_depth: int = 7
    summary: str = "scripted"
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, top_p=0.95, max_tokens=None))
    seeds: list[int] = field(default_factory=list)
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size)

    def make_requests(
        self, id: str, prompt: Sequence[int], sampling: SamplingParams, arrived_s: float = 0.0, cache_salt: bytes = b""
    ) -> list[Request]:
        sampling.check_tokens(self.vocab_size)
        seed = (sampling.seed or 0) % 2**64
        made = [
            Request(f"{id}-{i}", np.array(prompt, np.int32), sampling.replace(n=1), seed + i, arrived_s, cache_salt)
            for i in range(sampling.n)
        ]
        self.seeds += [request.seed for request in made]
        self.engine.check(made[0])
        return made


def echo_script(request: Request) -> Iterator[list[int]]:
    """The model says the prompt's own bytes again, one a step, then ends."""
    for token in request.prompt:
        if token < 256:
            yield [int(token)]
    yield [EOS]


class Client:
    """A small HTTP client that shows everything: status, headers, JSON, events."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def open(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None, timeout: float = 10.0
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} if raw is not None else {}
        connection.request(method, path, raw, {**given, **(headers or {})})
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]  # kept alive with its response
        return response

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        response = self.open("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        return response.status, _parsed(response)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        response = self.open("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return response.status, _parsed(response)

    def complete(self, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", {"prompt": "hello", **fields})

    def chat(self, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **fields})

    def events(self, path: str, **fields: Any) -> list[Any]:
        """Every data event of a stream, parsed; the last is "[DONE]"."""
        response = self.open("POST", path, {"stream": True, **fields})
        assert response.status == 200, response.read()
        lines = response.read().decode().split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(entry) if entry != "[DONE]" else entry for entry in data]

    def metric(self, name: str) -> float:
        """The sum of all samples of one name in /metrics."""
        status, text = self.get("/metrics")
        assert status == 200
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0] == name)


def _parsed(response: http.client.HTTPResponse) -> Any:
    raw = response.read().decode()
    with contextlib.suppress(ValueError):
        return json.loads(raw)
    return raw


@dataclass(slots=True)
class Running:
    server: HttpServer
    service: Service
    engine: ScriptedEngine
    loaded: FakeLoaded
    client: Client
    url: str
    thread: threading.Thread
    codes: list[int]

    def stop(self) -> int:
        """Drains and ends the server; its exit code."""
        self.engine.gate.set()
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.engine.shutdown()
        return self.codes[0] if self.codes else -1


StartServer = Callable[..., Running]


def start_running(
    script: Script = echo_script,
    limits: Limits | None = None,
    spec_detail: str = "none",
    prefix: str = "both",
    wait: bool = True,
    load: Callable[[], object] | None = None,
    **options: Any,
) -> Running:
    """A server on a free port over a scripted engine, serving (wait) or still loading."""
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, script)
    loaded = FakeLoaded(engine, tokenizer, ChatTemplate(TEMPLATE, tokenizer))
    service = Service(Metrics(prefix), limits or Limits(), spec_detail)  # type: ignore[arg-type]
    ready = threading.Event()

    def loading() -> Any:
        if load is not None:
            load()
        engine.start()
        return loaded

    server = HttpServer(service, ServeOptions(port=0, **options), loading, lambda _: ready.set())
    url = server.bind()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(server.run()), daemon=True)
    thread.start()
    if wait:
        assert ready.wait(10)
    return Running(server, service, engine, loaded, Client(url), url, thread, codes)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """start_running, with everything it started stopped after the test."""
    started: list[Running] = []

    def start(*args: Any, **kwargs: Any) -> Running:
        started.append(start_running(*args, **kwargs))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """One echoing server for a whole file: for tests that leave nothing behind."""
    started = start_running(spec_detail="detailed")
    yield started
    started.stop()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """make_tokenizer(), once."""
    return make_tokenizer()
