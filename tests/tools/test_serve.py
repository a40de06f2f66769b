"""`python tools/serve.py` as a process, through the official client: the real model, engine and speculation."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from model.tiny import make_tiny
from server.client import ApiClient, ServerRefused
from tests.waits import join, line_with

ROOT = Path(__file__).resolve().parents[2]
USER: Any = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
CODE = "def add(a, b):"


@dataclass
class Process:
    popen: subprocess.Popen[str]
    url: str
    lines: list[str]

    @property
    def http(self) -> ApiClient:
        return ApiClient(self.url)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(30)


# OpenBLAS's threads wait for each other by spinning: on cores that are shared, steps of 60 ms became 4 s.
ADDRESS = r" at (http://[\d.]+:\d+) "
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def start(*options: str) -> Process:
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--port", "0", *options]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", env=ENVIRONMENT)
    found, lines = line_with(popen, ADDRESS)
    return Process(popen, found[1], lines)


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    process = start("--per-request-spec-decode-metrics", "detailed")
    yield process
    if process.popen.poll() is None:
        assert process.stop() == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("serve") / "tiny"))


def until(true: Any, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.002)
    return False


def test_start_up_says_what_was_chosen(served: Process) -> None:
    assert "DDTree" in served.lines[0], "the demo brings a drafter, so it is used"
    assert "curl " in served.lines[1]
    assert served.http.get("/health") == {"status": "ok"}
    models = served.openai.models.list().data
    assert [model.id for model in models] == ["demo"]
    assert served.openai.models.retrieve("demo").model_extra is not None


def test_chat_streams_what_it_answers_whole(served: Process) -> None:
    client = served.openai
    whole = client.chat.completions.create(model="demo", messages=USER, max_tokens=8, temperature=0)
    message = whole.choices[0].message
    text = (getattr(message, "reasoning_content", None) or "") + (message.content or "")
    assert text.strip()
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    record = whole.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert sum(record["acceptance_histogram"]) == record["num_spec_steps"] > 0

    joined, last = "", None
    stream = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            joined += (getattr(choice.delta, "reasoning_content", None) or "") + (choice.delta.content or "")
    assert joined == text
    assert last is not None
    assert last.choices == []
    assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})  # type: ignore[union-attr]


def test_completion_with_logprobs(served: Process) -> None:
    answer = served.openai.completions.create(model="demo", prompt=CODE, max_tokens=8, temperature=0, logprobs=3)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 8
    assert "".join(choice.logprobs.tokens or []) == choice.text
    for drawn, logprob, top in zip(
        choice.logprobs.tokens or [], choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert logprob <= 0
        assert top[drawn] == max(top.values()), "greedy takes the likeliest"
        assert len(top) == 3


def test_stop_ends_before_the_string(served: Process) -> None:
    client = served.openai
    free = client.completions.create(model="demo", prompt=CODE, max_tokens=12, temperature=0).choices[0].text
    middle = free[len(free) // 2 :][:3]
    stopped = client.completions.create(model="demo", prompt=CODE, max_tokens=12, temperature=0, stop=[middle]).choices[0]
    assert stopped.text == free[: free.index(middle)]
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra is not None
    assert stopped.model_extra["stop_reason"] == middle


def test_n_choices_differ_and_repeat_and_company_changes_nothing(served: Process) -> None:
    def choices() -> list[str]:
        answer = served.openai.completions.create(model="demo", prompt=CODE, max_tokens=10, n=2, seed=5, temperature=1.0)
        return [choice.text for choice in answer.choices]

    first = choices()
    assert first[0] != first[1]
    others = [
        threading.Thread(target=served.http.post, args=("/v1/completions", {"prompt": f"class A{i}:", "max_tokens": 12, "seed": i}))
        for i in range(3)
    ]
    for other in others:
        other.start()
    assert choices() == first, "beside three other requests"
    for other in others:
        join(other)
    alone = served.openai.completions.create(model="demo", prompt=CODE, max_tokens=10, seed=5, temperature=1.0).choices[0].text
    assert alone == first[0], "choice 0 is what n = 1 gives"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(served: Process, stream: bool) -> None:
    body = json.dumps({"prompt": "import os\n" * 20, "max_tokens": 3000, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + body)
        assert until(lambda: served.metric("vllm:num_requests_running") == 1)
        assert served.metric('runtime:kv_pages{engine="0",model_name="demo",state="used"}') > 0
    assert until(lambda: served.metric("vllm:num_requests_running") == 0)
    assert served.metric('runtime:kv_pages{engine="0",model_name="demo",state="used"}') == 0
    assert served.metric("vllm:kv_cache_usage_perc") == 0


def test_a_wrong_request_is_the_clients_exception(served: Process) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        served.openai.completions.create(model="demo", prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        served.openai.completions.create(model="other", prompt="x")


def test_sigterm_lets_a_stream_end(tiny: str) -> None:
    process = start(tiny)
    body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream_options": {"include_usage": True}}
    events = process.http.stream("/v1/completions", body)
    next(events)
    process.popen.send_signal(signal.SIGTERM)
    rest = list(events)
    assert rest[-1]["usage"]["completion_tokens"] == 100
    assert process.popen.wait(20) == 0


def test_a_second_sigterm_does_not_wait(tiny: str) -> None:
    process = start(tiny, "--spec-method", "none")
    events = process.http.stream("/v1/completions", {"prompt": "abc", "max_tokens": 400, "ignore_eos": True})
    next(events)
    process.popen.send_signal(signal.SIGTERM)
    assert until(lambda: not is_ready(process))
    begin = time.monotonic()
    process.popen.send_signal(signal.SIGTERM)
    with pytest.raises(ServerRefused, match="stopped before"):
        list(events)
    assert process.popen.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 10


def is_ready(process: Process) -> bool:
    try:
        return bool(process.http.get("/ready"))
    except (ServerRefused, OSError):
        return False


def test_sigterm_while_loading_ends_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--port", str(port)]
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    assert until(lambda: listens(port))
    popen.send_signal(signal.SIGTERM)
    assert popen.wait(10) == 0


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_the_key_and_the_alias_flags(tiny: str) -> None:
    process = start(
        "--model-path",
        tiny,
        "--served-model-name",
        "t",
        "--api-key",
        "secret",
        "--context-length",
        "64",
        "--speculative-algorithm",
        "DFLASH",
    )
    try:
        with pytest.raises(ServerRefused) as caught:
            process.http.get("/v1/models")
        assert caught.value.status == 401
        card = ApiClient(process.url, "secret").get("/v1/models/t")
        assert card["max_model_len"] == 64
        assert "chain" in process.lines[0]
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["/nowhere"], "/nowhere"),
        (["--speculative-config", "{"], "speculative_config"),
        (["--speculative-config", "{}", "--tree-budget", "8"], "--tree-budget"),
        (["--spec-method", "none", "--spec-tokens", "3"], "--spec-tokens"),
        (["demo", "--model", "other"], "--model"),
        (["--max-model-len", "1000000"], "max_model_len"),
        (["--host", "256.0.0.1"], ""),
        (["--port", "99999999"], "--port"),
        (["--api-key", " "], "--api-key"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_what_is_not_usable_ends_with_2_and_one_line(options: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "serve.py"), "--port", "0", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_said(served: Process) -> None:
    port = served.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "serve.py"), "--port", port], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_help_needs_no_model_and_groups_its_options() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "serve.py"), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for group in ("model:", "capacity:", "speculation:", "http:", "observation:", "examples:"):
        assert f"\n{group}" in done.stdout
