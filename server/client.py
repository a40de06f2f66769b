"""A client of the API over the standard library alone: for the terminal chat, the bench and tests."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit


class ServerRefused(RuntimeError):
    """The server's answer was an error; `status` is its HTTP status, the text its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """One server. Every call opens its own connection, so threads may share a client.

    base_url may end in /v1 or not. Raises ServerRefused for an HTTP error, OSError when nobody listens.
    """

    def __init__(self, base_url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base URL {base_url!r}: want http://HOST:PORT")
        self.base_url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """The JSON of a GET, or its text where it is no JSON."""
        with _Closing(self._send("GET", path, None)) as response:
            raw = response.read().decode()
        try:
            return json.loads(raw)
        except ValueError:
            return raw

    def model(self) -> str:
        """The name of the model that is served."""
        return str(self.get("/v1/models")["data"][0]["id"])

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a whole answer."""
        with _Closing(self._send("POST", path, body)) as response:
            return json.loads(response.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer as they come; closing the iterator closes the connection, which aborts the request."""
        with _Closing(self._send("POST", path, {**body, "stream": True})) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerRefused(int(event["error"].get("code") or 500), str(event["error"].get("message")))
                yield event

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when /ready says so. Raises TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/ready")
                return
            except (ServerRefused, OSError) as error:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{self.base_url} was not ready within {timeout_s:g} s: {error}") from error
            time.sleep(0.05)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        connection: http.client.HTTPConnection
        if self._secure:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        raw = None if body is None else json.dumps(body).encode()
        headers = self._headers if raw is None else {**self._headers, "content-type": "application/json"}
        connection.request(method, self._prefix + path, raw, headers)
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]  # closed together, by _Closing
        if response.status >= 400:
            with _Closing(response):
                raise ServerRefused(response.status, _message_of(response.read()))
        return response


class _Closing:
    """Closes a response and its connection."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def __enter__(self) -> http.client.HTTPResponse:
        return self._response

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._response.connection.close()  # type: ignore[attr-defined]


def _message_of(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
