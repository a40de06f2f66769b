"""How many events a second the server passes on; the floor is far below what an idle machine does (25,000 to 40,000)."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

FLOOR_PER_S = 1000


async def read_stream(host: str, port: int, tokens: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": tokens}).encode()
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    data = b""
    while b"[DONE]" not in data[-40:]:
        data += await reader.read(1 << 16)
    writer.close()
    return data.count(b'"text":"a"')


@pytest.mark.parametrize(("streams", "tokens"), [(1, 2000), (32, 100)])
def test_events_a_second(start_server: Any, streams: int, tokens: int) -> None:
    server = start_server(lambda _: ([97] for _ in range(10**6)))

    async def load() -> list[int]:
        return await asyncio.gather(*(read_stream(server.client.host, server.client.port, tokens) for _ in range(streams)))

    begin = time.perf_counter()
    counts = asyncio.run(asyncio.wait_for(load(), 60))
    per_s = sum(counts) / (time.perf_counter() - begin)
    print(f"\n{streams} streams: {per_s:,.0f} events/s")
    assert counts == [tokens] * streams
    assert per_s > FLOOR_PER_S


def first_event_ms(sock: socket.socket) -> float:
    """From the last byte of a request to the first of its first event, on a connection that lives on."""
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    begin, first, data = time.perf_counter(), None, b""
    sock.sendall(head.encode() + body)
    while not data.endswith(b"0\r\n\r\n"):
        came = sock.recv(1 << 16)
        assert came, f"the server closed the connection after {data[-80:]!r}"
        data += came
        if first is None and b"data: " in data:
            first = time.perf_counter()
    assert first is not None
    return 1e3 * (first - begin)


def test_the_first_token_is_sent_at_once(start_server: Any) -> None:
    """An idle machine takes 1 ms; 40 ms is a small packet waiting for the acknowledgement of the one before it."""
    server = start_server(lambda _: [[97], [256]])
    with socket.create_connection((server.client.host, server.client.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        waits_ms = sorted(first_event_ms(sock) for _ in range(200))
    print(f"\nfirst event: p50 {waits_ms[100]:.2f}, p90 {waits_ms[180]:.2f}, p99 {waits_ms[198]:.2f} ms")
    assert waits_ms[100] < 20
