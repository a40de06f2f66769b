"""/openapi.json: the document of the API, made of the request structs themselves, so that it can not fall behind them."""

from __future__ import annotations

from typing import Any

import msgspec

from server.messages import CountRequest, MessagesRequest
from server.protocol import ChatRequest, CompletionRequest, Usage
from server.responses import ResponsesRequest
from server.tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Completes prompts: text, token ids, or a list of either. Streams with stream: true."),
    "/v1/chat/completions": (ChatRequest, "Answers a conversation. Streams with stream: true."),
    "/v1/responses": (ResponsesRequest, "The same in the form of OpenAI's Responses: text, reasoning, functions; nothing is stored."),
    "/v1/messages": (MessagesRequest, "The same in Anthropic's form: text, thinking, tools."),
    "/v1/messages/count_tokens": (CountRequest, "How many tokens a conversation has."),
    "/tokenize": (TokenizeRequest, "The token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
READS = {
    "/health": "200 while the engine steps, 503 while it loads or when it has failed. Needs no key.",
    "/ready": "200 while new requests are taken, 503 while loading, draining or failed. Needs no key.",
    "/health_generate": "200 once one token has been generated.",
    "/metrics": "Prometheus metrics.",
    "/version": "The server's version.",
    "/server_info": "What is loaded, with which options.",
    "/dashboard": "A live page.",
    "/dashboard.json": "Its figures.",
    "/openapi.json": "This document.",
    "/v1/models": "The model that is served.",
    "/v1/models/{model_id}": "The same, or 404.",
}
_REFUSALS = {
    "400": "A field is wrong or not supported; error.param names it",
    "401": "No valid key",
    "404": "Another model's name",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "503": "The queue is full, the model is loading, or the server is shutting down; see Retry-After",
}


def openapi(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    kinds = [kind for kind, _ in BODIES.values()]
    schemas, components = msgspec.json.schema_components([*kinds, Usage], ref_template="#/components/schemas/{name}")
    components["Error"] = _error_schema()
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(BODIES.items(), schemas, strict=False):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation(path, text), "requestBody": body}}
        paths[path]["post"]["responses"] |= {code: _refusal(why) for code, why in _REFUSALS.items()}
    for path, text in READS.items():
        paths[path] = {"get": _operation(path, text)}
    named = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model_id}"]["get"]["parameters"] = [named]
    paths["/v1/models/{model_id}"]["get"]["responses"]["404"] = _refusal(_REFUSALS["404"])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Threshold", "version": version or "0", "description": "null and absent mean the same in every request."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(path: str, text: str) -> dict[str, Any]:
    name = path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_")
    return {"operationId": name, "summary": text, "responses": {"200": {"description": "The answer"}}}


def _refusal(why: str) -> dict[str, Any]:
    return {"description": why, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _error_schema() -> dict[str, Any]:
    inner = {
        "type": "object",
        "required": ["message", "type"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}, "code": {}},
    }
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}
