"""Loading, draining, dying, overload."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

EOS = 256


def wait_for(true: Any, within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    assert true()


def streams(server: Any, count: int) -> list[Any]:
    return [server.client.open("POST", "/v1/completions", {"prompt": "x", "stream": True}) for _ in range(count)]


def test_while_loading_health_says_503_and_then_200(start_server: Any) -> None:
    go = threading.Event()
    server = start_server(load=go.wait, wait=False)
    assert server.client.get("/health") == (503, {"status": "loading"})
    assert server.client.get("/ready")[0] == 503
    assert server.client.get("/v1/models") == (200, {"object": "list", "data": []})
    response = server.client.open("POST", "/v1/completions", {"prompt": "x"})
    assert response.status == 503
    assert response.getheader("retry-after")
    assert server.client.get("/metrics")[0] == 200
    go.set()
    wait_for(lambda: server.client.get("/health")[0] == 200)
    assert server.client.get("/ready") == (200, {"status": "ready"})
    assert server.client.complete()[0] == 200
    assert server.client.metric("vllm:admission_rejections_total") == 1


def test_a_stop_while_loading_does_not_wait(start_server: Any) -> None:
    server = start_server(load=threading.Event().wait, wait=False)
    assert server.client.get("/health")[0] == 503
    start = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start < 10


def test_a_load_that_fails_is_raised_from_run(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_value))

    def fail() -> None:
        raise ValueError("no such checkpoint")

    server = start_server(load=fail, wait=False)
    server.thread.join(5)
    assert isinstance(caught[0], ValueError)
    assert server.codes == []


def test_drain_lets_streams_end_and_refuses_newcomers(start_server: Any) -> None:
    server = start_server(lambda _: [[97]] * 60 + [[EOS]])
    server.engine.step_s = 0.01
    open_streams = streams(server, 16)
    idle_reader = server.client.get("/ready")
    assert idle_reader[0] == 200
    server.server.stop()
    wait_for(lambda: server.service.draining)
    assert server.client.get("/ready") == (503, {"status": "draining"})
    assert server.client.get("/health")[0] == 200
    refused = server.client.open("POST", "/v1/completions", {"prompt": "x"})
    assert refused.status == 503
    assert refused.getheader("retry-after")
    bodies = [response.read().decode() for response in open_streams]
    assert all(body.endswith("data: [DONE]\n\n") for body in bodies)
    assert all(body.count('"text":"a"') == 60 for body in bodies), "cut short"
    assert server.stop() == 0


def test_drain_that_takes_too_long_ends_with_an_error_event(start_server: Any) -> None:
    server = start_server(lambda _: [[97]] * 100_000, shutdown_timeout_s=0.3)
    server.engine.step_s = 0.01
    (stream,) = streams(server, 1)
    server.server.stop()
    body = stream.read().decode()
    assert '"code":503' in body
    assert body.endswith("data: [DONE]\n\n")
    assert server.stop() == 0
    assert server.engine.stats().pages_used == 0


def test_a_dead_engine_ends_everything_and_the_exit_code_says_so(start_server: Any) -> None:
    server = start_server(lambda _: [[97]] * 100_000)
    server.engine.step_s = 0.01
    open_streams = streams(server, 4)
    server.engine.dead = True
    assert server.client.get("/health") == (503, {"status": "dead", "reason": "the engine has failed: no <path>"})
    start = time.monotonic()
    bodies = [response.read().decode() for response in open_streams]
    assert all('"error"' in body and body.endswith("data: [DONE]\n\n") for body in bodies)
    server.thread.join(5)
    assert time.monotonic() - start < 5
    assert server.codes == [1]


def test_overload_refuses_the_excess_quickly_and_serves_the_rest(start_server: Any) -> None:
    server = start_server(lambda _: [[97], [EOS]])
    server.engine.max_running, server.engine.max_waiting = 4, 4
    server.engine.gate.clear()
    admitted = streams(server, 8)
    for _ in range(40):  # no step is made meanwhile: an answer that waits for a seat never comes
        response = server.client.open("POST", "/v1/completions", {"prompt": "x", "stream": True})
        assert response.status == 503
        assert response.getheader("retry-after")
        assert b"queue is full" in response.read()
    server.engine.gate.set()
    assert all(response.read().endswith(b"data: [DONE]\n\n") for response in admitted)
    assert server.client.metric("vllm:admission_rejections_total") == 40


def test_a_request_that_only_fits_in_part_is_refused_whole(start_server: Any) -> None:
    server = start_server(lambda _: [[97], [EOS]])
    server.engine.max_running, server.engine.max_waiting = 3, 0
    server.engine.gate.clear()
    assert server.client.complete(n=4)[0] == 503
    assert server.engine.stats().running == 0, "those before the refusal were withdrawn"
    server.engine.gate.set()
    assert server.client.complete(n=3)[0] == 200
