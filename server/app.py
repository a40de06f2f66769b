"""The routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access import InFlight, KeyGate, read_body, send_error
from server.answer import json_response
from server.chat import chat
from server.completion import complete
from server.decode import NotServed
from server.errors import ApiError, internal, scrub
from server.info import dashboard_figures, health_generate, server_info
from server.messages import NOT_SERVED as NOT_IN_MESSAGES
from server.messages import CountRequest, MessagesRequest, count_tokens, create_message
from server.messages import error_json as messages_error
from server.metrics import CONTENT_TYPE
from server.openapi import openapi
from server.protocol import NOT_SERVED, ChatRequest, CompletionRequest
from server.responses import NOT_SERVED as NOT_IN_RESPONSES
from server.responses import ResponsesRequest, respond
from server.service import Service
from server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

log = logging.getLogger("server")

PAGE = Path(__file__).with_name("dashboard.html")
PAGE_HEADERS = {"content-security-policy": "default-src 'self' 'unsafe-inline'", "cache-control": "no-cache"}  # it fetches nothing else
Endpoint = Callable[[Service, Any, Receive], Awaitable[ASGIApp]]


def make_app(service: Service, keys: Sequence[str] = (), version: str = "", origins: Sequence[str] = ()) -> ASGIApp:
    """The ASGI application over `service`. With keys, every path but /health and /ready needs one.

    origins: web origins whose pages may call from a browser; never with cookies, so a key must be sent all the same.
    """
    routes = [
        Route("/health", _health(service)),
        Route("/ready", _ready(service)),
        Route("/metrics", _metrics(service)),
        Route("/version", _version(version)),
        Route("/v1/models", _models(service)),
        Route("/v1/models/{model_id:path}", _model(service)),
        Route("/v1/completions", Generate(service, CompletionRequest, complete), methods=["POST"]),
        Route("/v1/chat/completions", Generate(service, ChatRequest, chat), methods=["POST"]),
        Route("/v1/responses", Generate(service, ResponsesRequest, respond, NOT_IN_RESPONSES), methods=["POST"]),
        Route("/v1/messages", Generate(service, MessagesRequest, create_message, NOT_IN_MESSAGES, messages_error), methods=["POST"]),
        Route("/v1/messages/count_tokens", Generate(service, CountRequest, count_tokens, {}, messages_error), methods=["POST"]),
        Route("/tokenize", Generate(service, TokenizeRequest, tokenize), methods=["POST"]),
        Route("/detokenize", Generate(service, DetokenizeRequest, detokenize), methods=["POST"]),
        *_information(service, version),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, ApiError: _api_error})
    app.router.redirect_slashes = False
    gate: ASGIApp = KeyGate(InFlight(app, service), keys)
    if origins:
        return CORSMiddleware(gate, origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["retry-after"])
    return gate


class Generate:
    """One endpoint with a body: body to request struct, to the response that `endpoint` makes; refusals in the form of error_json."""

    def __init__(
        self,
        service: Service,
        kind: type[msgspec.Struct],
        endpoint: Endpoint,
        not_served: NotServed = NOT_SERVED,
        error_json: Callable[[ApiError], bytes] = ApiError.json,
    ) -> None:
        self._service = service
        self._kind = kind
        self._endpoint = endpoint
        self._not_served = not_served
        self._error_json = error_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._service.limits)
            request = self._service.decoder.decode(body, self._kind, self._not_served)
            response = await self._endpoint(self._service, request, receive)
        except ApiError as error:
            await send_error(send, error, self._error_json(error))
            return
        except Exception:
            log.exception("a request failed")
            await send_error(send, internal(), self._error_json(internal()))
            return
        await response(scope, receive, send)


def _information(service: Service, version: str) -> list[Route]:
    async def info(_: HttpRequest) -> Response:
        return server_info(service, version)

    async def probe(_: HttpRequest) -> Response:
        return await health_generate(service)

    async def figures(_: HttpRequest) -> Response:
        return dashboard_figures(service)

    async def page(_: HttpRequest) -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    async def document(_: HttpRequest) -> Response:
        return json_response(openapi(version))

    return [
        Route("/server_info", info),
        Route("/health_generate", probe),
        Route("/dashboard", page),
        Route("/dashboard.json", figures),
        Route("/openapi.json", document),
    ]


def _health(service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def health(_: HttpRequest) -> Response:
        if service.loaded is None:
            return json_response({"status": "loading"}, 503)
        trouble = service.trouble()
        return json_response({"status": "ok"}) if trouble is None else json_response({"status": "dead", "reason": scrub(trouble)}, 503)

    return health


def _ready(service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def ready(_: HttpRequest) -> Response:
        if service.loaded is None:
            return json_response({"status": "loading"}, 503)
        if service.trouble() is not None:
            return json_response({"status": "dead"}, 503)
        if service.draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ready"})

    return ready


def _metrics(service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def metrics(_: HttpRequest) -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    return metrics


def _version(version: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def show(_: HttpRequest) -> Response:
        return json_response({"version": version})

    return show


def _models(service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def models(_: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [] if service.loaded is None else [_model_card(service)]})

    return models


def _model(service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def model(request: HttpRequest) -> Response:
        name = request.path_params["model_id"]
        if service.loaded is None or name != service.loaded.name:
            raise ApiError(404, f"the model {name[:120]!r} does not exist", "model")
        return json_response(_model_card(service))

    return model


def _model_card(service: Service) -> dict[str, Any]:
    loaded = service.loaded
    if loaded is None:
        raise ApiError(503, "the model is loading")
    return {
        "id": loaded.name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "threshold",
        "root": loaded.name,
        "parent": None,
        "max_model_len": loaded.max_model_len,
    }


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        error = internal()
    return Response(error.json(), error.status, headers=error.headers, media_type="application/json")


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    method = request.method if request.method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "this method"
    message = {404: "no such path; /openapi.json lists them", 405: f"{method} is not allowed here"}
    return await _api_error(request, ApiError(status, message.get(status, "the request can not be served"), headers=headers))
