"""Streams: headers at once, keep-alive, errors inside, clients that leave or do not read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from runtime.types import Emission
from server.limits import Limits

EOS = 256
LONG = [[97]] * 3000
BIG = Emission("", (97,), "y" * 1_000_000)  # the kernel's own buffers take 4 to 10 MB


def until(true: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.005)
    return False


def idle(server: Any) -> bool:
    return server.engine.stats().pages_used == 0 and server.service.requests_in_flight == 0 and not server.service.generations


def open_socket(server: Any, path: str, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    sock = socket.create_connection((server.client.host, server.client.port), timeout=10)
    sock.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


def test_headers_and_keep_alive_come_before_the_first_token(start_server: Any) -> None:
    server = start_server(lambda _: [[97], [EOS]], limits=Limits(keep_alive_s=0.1))
    server.engine.gate.clear()
    response = server.client.open("POST", "/v1/completions", {"prompt": "x", "stream": True})
    assert response.status == 200
    assert response.getheader("x-accel-buffering") == "no"
    assert response.getheader("content-type", "").startswith("text/event-stream")
    assert response.getheader("cache-control") == "no-cache"
    assert [response.readline() for _ in range(4)] == [b": keep-alive\n", b"\n"] * 2
    server.engine.gate.set()
    rest = response.read().decode()
    assert "[DONE]" in rest
    assert '"text":"a"' in rest


def test_no_keep_alive_while_tokens_flow(start_server: Any) -> None:
    server = start_server(lambda _: [[97]] * 40, limits=Limits(keep_alive_s=0.2))
    server.engine.step_s = 0.01
    assert b"keep-alive" not in server.client.open("POST", "/v1/completions", {"prompt": "x", "stream": True}).read()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1])
def test_a_client_that_leaves_frees_everything(start_server: Any, path: str, stream: bool, after_s: float) -> None:
    server = start_server(lambda _: LONG)
    server.engine.step_s = 0.005
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": 3, "stream": stream}
    sock = open_socket(server, path, body)
    time.sleep(after_s)
    sock.close()
    time.sleep(0.1)  # a request whose client leaves at once may not have been read yet
    assert until(lambda: idle(server), 3.0)
    assert server.client.metric("vllm:num_requests_running") == 0
    assert server.client.get("/health")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("started", [True, False])
def test_a_request_has_the_time_it_was_given(start_server: Any, stream: bool, started: bool) -> None:
    server = start_server(lambda _: LONG, limits=Limits(request_timeout_s=0.3))
    server.engine.step_s = 0.01
    if not started:
        server.engine.gate.clear()
    begin = time.monotonic()
    response = server.client.open("POST", "/v1/completions", {"prompt": "x", "stream": stream, "n": 2})
    body = response.read().decode()
    assert 0.25 < time.monotonic() - begin < 15, "the text takes 30 s"
    assert response.status == (200 if stream else 504)
    assert '"code":504' in body and ("[DONE]" in body) == stream and ('"text":"a"' in body) == (stream and started)
    assert until(lambda: idle(server), 3.0) and len(server.engine.aborted) == 2
    server.engine.gate.set()
    server.engine.script = lambda _: [[97], [EOS]]
    assert server.client.complete()[0] == 200, "one that ends in time"


def test_leaving_while_queued_frees_too(start_server: Any) -> None:
    server = start_server(lambda _: LONG)
    server.engine.gate.clear()
    sock = open_socket(server, "/v1/completions", {"prompt": "x"})
    assert until(lambda: server.engine.stats().running == 1)
    sock.close()
    assert until(lambda: idle(server), 3.0), "although no step was made"


def test_many_disconnects_leave_nothing(start_server: Any) -> None:
    server = start_server(lambda _: LONG)
    server.engine.step_s = 0.002
    for i in range(60):
        sock = open_socket(server, "/v1/completions", {"prompt": "x", "stream": i % 2 == 0})
        time.sleep(0.001 * (i % 7))
        sock.close()
    assert until(lambda: idle(server))
    assert len(server.engine.aborted) <= 60


def test_normal_ends_abort_nothing(start_server: Any) -> None:
    server = start_server(lambda _: [[97], [EOS]])
    for i in range(40):
        if i % 2:
            server.client.complete(n=2)
        else:
            server.client.events("/v1/completions", prompt="x")
    assert server.engine.aborted == []
    assert until(lambda: idle(server))
    assert server.client.metric("vllm:e2e_request_latency_seconds_count") == 60


def test_a_client_that_does_not_read_is_cut_off(start_server: Any) -> None:
    server = start_server(lambda _: [BIG] * 400, limits=Limits(queue_events=8, queue_chars=1 << 30))
    server.engine.step_s = 0.002
    sock = open_socket(server, "/v1/completions", {"prompt": "x", "stream": True})
    assert until(lambda: len(server.engine.aborted) == 1, 15.0), "the queue is bounded"
    assert until(lambda: not server.service.generations)
    server.engine.script = lambda _: [[97], [EOS]]
    assert server.client.complete()[0] == 200, "others are served"
    sock.close()


def test_a_client_that_reads_is_not_cut_off_by_an_engine_in_a_hurry(start_server: Any) -> None:
    server = start_server(lambda _: [[97]] * 3000)
    server.loaded.max_model_len = 10**6
    for path in ("/v1/completions", "/v1/chat/completions"):
        events = server.client.events(path, prompt="x", messages=[{"role": "user", "content": "x"}])
        assert events[-1] == "[DONE]"
    assert server.engine.aborted == []


def test_a_write_that_is_not_taken_times_out(start_server: Any) -> None:
    server = start_server(lambda _: [BIG] * 40 + [[EOS]], limits=Limits(queue_chars=1 << 30, write_timeout_s=0.3))
    server.engine.step_s = 0.002
    sock = open_socket(server, "/v1/completions", {"prompt": "x", "stream": True})
    assert until(lambda: server.engine.stats().finished["stop"] == 1), "40 MB wait to be read"
    assert until(lambda: idle(server))
    sock.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_error_inside_a_stream_is_an_event(start_server: Any, path: str) -> None:
    failed = Emission("", (), "", finish="error", error="logits at 0x7f00aa of /usr/lib/x/y.so are not finite")
    server = start_server(lambda _: [[97], failed])
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    events = server.client.events(path, **body)
    assert events[-1] == "[DONE]"
    error = events[-2]["error"]
    assert error["code"] == 500
    assert "not finite" in error["message"]
    assert "0x7f" not in error["message"]
    assert "/usr" not in error["message"]
    status, answer = server.client.post(path, body)
    assert (status, answer["error"]["code"]) == (500, 500)
    assert until(lambda: idle(server))


def test_one_choice_that_fails_ends_them_all(start_server: Any) -> None:
    failed = Emission("", (), "", finish="error", error="not finite")
    server = start_server(lambda request: [[97], failed] if request.seed == 1 else LONG)
    assert server.client.complete(n=3, seed=0)[0] == 500
    assert until(lambda: idle(server))
