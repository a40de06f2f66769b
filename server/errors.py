"""Errors as clients see them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from runtime.types import InvalidRequest

MAX_MESSAGE_CHARS = 600  # an answer never grows with what was sent

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PATH = re.compile(r"(?<![\w:/])(?:/[\w.+\-]+){2,}")


class ApiError(Exception):
    """A refusal with its HTTP status; `param` names the field of the request that caused it."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "BadRequestError"),
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}

    def json(self) -> bytes:
        return msgspec.json.encode(self.body())


def bad_field(field: str, message: str) -> ApiError:
    """A 400 that names the field, in the message and in `param`."""
    return ApiError(400, f"{field}: {message}", field)


def from_invalid(error: InvalidRequest, rename: Mapping[str, str] | None = None) -> ApiError:
    """InvalidRequest of the runtime as a 400; `rename` maps its field to the one the client sent."""
    field = (rename or {}).get(error.field, error.field)
    _, _, message = str(error).partition(": ")
    return bad_field(field, message)


def internal(message: str = "the request failed inside the server; the log has the cause") -> ApiError:
    """A 500 whose text never shows an address or a path of this machine."""
    return ApiError(500, scrub(message))


def scrub(text: str) -> str:
    """The text without memory addresses and file-system paths, and bounded."""
    return _PATH.sub("<path>", _ADDRESS.sub("<address>", text))[:MAX_MESSAGE_CHARS]


def echo(value: object, limit: int = 80) -> str:
    """A value out of a request, bounded, for an error text."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer above 4300 digits, or a value nested very deeply, has no repr
        return "a value too long to print"
    return text if len(text) <= limit else text[:limit] + "…"
