"""The key, the caps on body and headers, and paths that try to go around them."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from server.limits import Limits


def raw(server: Any, data: bytes, wait_s: float = 5.0) -> bytes:
    with socket.create_connection((server.client.host, server.client.port), timeout=wait_s) as sock:
        sock.sendall(data)
        try:
            return sock.recv(65536)
        except TimeoutError:
            return b""


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_without_a_key_only_health_and_ready_answer(start_server: Any) -> None:
    server = start_server(keys=("one", "two"))
    for path in ("/health", "/ready"):
        assert server.client.get(path)[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/nope", "/", "/health/", "/health/../v1/models"):
        status, body = server.client.get(path)
        assert (status, body["error"]["code"]) == (401, 401), path
    assert server.client.complete()[0] == 401
    assert server.client.chat()[0] == 401


@pytest.mark.parametrize("value", ["Bearer one", "bearer two", "Bearer  two "])
def test_a_right_key_passes(start_server: Any, value: str) -> None:
    server = start_server(keys=("one", "two"))
    assert server.client.get("/v1/models", authorization=value)[0] == 200
    assert server.client.post("/v1/completions", {"prompt": "a"}, authorization=value)[0] == 200


@pytest.mark.parametrize("value", ["Bearer On", "Bearer", "Basic one", "one", "Bearer one two", "Bearer onetwo", "Bearer \xff"])
def test_a_wrong_key_does_not(start_server: Any, value: str) -> None:
    server = start_server(keys=("one", "two"))
    assert server.client.get("/v1/models", authorization=value)[0] == 401


def test_two_authorization_headers_do_not(start_server: Any) -> None:
    server = start_server(keys=("one",))
    answer = raw(server, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\nauthorization: Bearer two\r\n\r\n")
    assert status_of(answer) == 401


@pytest.mark.parametrize(
    "target", [b"//v1/models", b"/v1/../v1/models", b"@x", b"/health/../v1/models", b"/health?/v1/models", b"/%76%31/models", b"*"]
)
@pytest.mark.parametrize("host", [b"a", b"a/health?x=", b"a/?x="])
def test_no_path_or_host_goes_around_the_key(start_server: Any, target: bytes, host: bytes) -> None:
    server = start_server(keys=("one",))
    answer = raw(server, b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
    assert b"max_model_len" not in answer
    assert status_of(answer) in ((200,) if target.startswith(b"/health?") else (400, 401, 404))


def test_without_keys_odd_paths_are_404(running: Any) -> None:
    for target in (b"//v1/models", b"/v1/../v1/models"):
        assert status_of(raw(running, b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")) == 404


def test_a_body_at_the_cap_passes_and_one_above_does_not(start_server: Any) -> None:
    server = start_server(limits=Limits(max_body_bytes=2000))
    for size, wanted in ((2000, 200), (2001, 413)):
        body = b'{"prompt": "a"}'
        response = server.client.open("POST", "/v1/completions", body + b" " * (size - len(body)))
        assert response.status == wanted
        response.read()
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"400\r\n"
        + b" " * 1024
        + b"\r\n"
    )
    assert status_of(raw(server, chunked + b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n")) == 413
    assert server.client.complete()[0] == 200


def test_a_body_that_trickles_is_dropped(start_server: Any) -> None:
    server = start_server(limits=Limits(body_timeout_s=0.3))
    answer = raw(server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    assert status_of(answer) == 408
    end = time.monotonic() + 2  # the answer may be read before the request is counted out
    while server.service.requests_in_flight and time.monotonic() < end:
        time.sleep(0.005)
    assert server.service.requests_in_flight == 0


def test_headers_are_capped(start_server: Any) -> None:
    server = start_server(limits=Limits(max_header_bytes=8192))
    answer = raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 300_000 + b"\r\n\r\n")
    assert not answer or status_of(answer) in (400, 431)
    assert server.client.get("/health")[0] == 200


def test_the_clients_request_id_is_only_echoed(running: Any) -> None:
    response = running.client.open("POST", "/v1/completions", {"prompt": "a"}, {"x-request-id": "abc-1"})
    assert response.getheader("x-request-id") == "abc-1"
    assert "abc-1" not in json.loads(response.read())["id"]
    response = running.client.open("POST", "/v1/completions", {"prompt": "a"}, {"x-request-id": "x" * 500})
    assert response.getheader("x-request-id") is None
    response.read()


def test_a_half_sent_request_holds_nothing(running: Any) -> None:
    sock = socket.create_connection((running.client.host, running.client.port), timeout=5)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    sock.close()
    end = time.monotonic() + 3
    while running.service.requests_in_flight and time.monotonic() < end:
        time.sleep(0.01)
    assert running.service.requests_in_flight == 0


def test_a_browser_may_call_from_the_origins_named_and_needs_the_key_all_the_same(start_server: Any) -> None:
    server = start_server(keys=("one",), origins=("https://a.org",))
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for origin, allowed in (("https://a.org", "https://a.org"), ("https://b.org", None)):
        preflight = server.client.open("OPTIONS", "/v1/completions", headers={"origin": origin, **asks})
        assert preflight.headers.get("access-control-allow-origin") == allowed
        assert preflight.headers.get("access-control-allow-credentials") is None
        whole = server.client.open("POST", "/v1/completions", {"prompt": "a"}, {"origin": origin, "authorization": "Bearer one"})
        assert whole.status == 200 and whole.headers.get("access-control-allow-origin") == allowed
        assert server.client.open("POST", "/v1/completions", {"prompt": "a"}, {"origin": origin}).status == 401
    plain = start_server()
    answer = plain.client.open("POST", "/v1/completions", {"prompt": "a"}, {"origin": "https://a.org"})
    assert answer.headers.get("access-control-allow-origin") is None, "off unless asked for"
