"""What stands before the routes, as plain ASGI: the key, the body's size and speed, the count of requests in flight."""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError
from server.limits import Limits
from server.service import Service

OPEN_PATHS = frozenset({"/health", "/ready"})  # all else needs the key, where one is set
BROWSER_PATHS = frozenset({"/dashboard", "/dashboard.json"})  # here a browser may ask its user: Basic, the key as the password
_SHOWABLE = re.compile(rb"[\x21-\x7e]{1,128}")


class KeyGate:
    """Answers 401 to every path but /health and /ready unless the request bears one of the keys.

    The path is the one the router sees (scope["path"]), never one rebuilt from the Host header.
    Keys are compared as SHA-256 digests in constant time, against all of them.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS and not self._bears_key(scope):
            message = "a valid API key is needed: send the header Authorization: Bearer KEY"
            scheme = 'Basic realm="the API key is the password"' if scope["path"] in BROWSER_PATHS else "Bearer"
            await send_error(send, ApiError(401, message, headers={"www-authenticate": scheme}))
            return
        await self._app(scope, receive, send)

    def _bears_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        given += [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]  # as Anthropic's clients send it
        if len(set(given)) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        scheme, token = scheme.lower(), token.strip()
        if scheme == b"basic" and scope["path"] in BROWSER_PATHS:
            scheme, token = b"bearer", _password(token)
        digest = sha256(token).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme == b"bearer" and any(matches)


def _password(token: bytes) -> bytes:
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except ValueError:
        return b""


class InFlight:
    """Counts requests to /v1/ until their answers are complete, and echoes the client's X-Request-Id."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        client_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and _SHOWABLE.fullmatch(client_id):
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", client_id)]
            await send(message)

        self._service.requests_in_flight += 1
        try:
            await self._app(scope, receive, send_with_id if client_id else send)
        finally:
            self._service.requests_in_flight -= 1


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The whole JSON body. Raises ApiError: 415 for another content type, 413 above the cap, 408 when it trickles, 400 when cut off."""
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        shown = content_type[:80].decode("latin-1") or "none"
        raise ApiError(415, f"content type {shown}; send JSON with the header Content-Type: application/json")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > limits.max_body_bytes:
        raise too_large(limits)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the connection ended before the body did")
                part = message.get("body", b"")
                size += len(part)
                if size > limits.max_body_bytes:
                    raise too_large(limits)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {limits.body_timeout_s:g} s") from None


def too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is above {limits.max_body_bytes} bytes", headers={"connection": "close"})


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    body = error.json() if body is None else body
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
