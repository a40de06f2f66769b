"""Bytes of a body to a request struct, or a 400 that names the field."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from server.errors import ApiError, bad_field, echo
from server.limits import Limits
from server.protocol import NOT_SERVED

log = logging.getLogger("server")

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
NotServed = Mapping[str, tuple[tuple[object, ...], str]]

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_MISMATCH = re.compile(r"^Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class RequestDecoder:
    """Decodes bodies; remembers which unknown fields it has already logged.

    Two passes over the bytes: msgspec for strict types, the standard library for what msgspec
    lets through (duplicate keys; the names of unknown fields).
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._logged: set[str] = set()

    def decode(self, body: bytes, kind: type[RequestT], not_served: NotServed = NOT_SERVED) -> RequestT:
        """The struct. Raises ApiError 400 with the field, or the byte, that is wrong; `not_served` says which fields are refused."""
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body is not UTF-8: byte {error.start}") from None
        if not text.strip():
            raise ApiError(400, "the body is empty; send a JSON object")
        try:
            request = msgspec.json.decode(body, type=kind)
            keys = _object_without_duplicates(text)
        except msgspec.ValidationError as error:
            _raise_named(str(error))
        except msgspec.DecodeError as error:
            raise _explain_malformed(text, str(error)) from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except ValueError as error:  # the second parser is the stricter one about numbers' lengths
            raise ApiError(400, f"the body is not valid JSON: {error}") from None
        self._check_unknown(keys, kind, not_served)
        return request

    def _check_unknown(self, keys: dict[str, Any], kind: type[msgspec.Struct], not_served: NotServed) -> None:
        for name in keys.keys() - set(kind.__struct_fields__):
            value = keys[name]
            off = not_served.get(name)
            if off is not None:
                if value is not None and value not in off[0]:
                    raise bad_field(name, f"not supported; {off[1]}")
            elif len(self._logged) < self._limits.max_logged_fields and name not in self._logged:
                self._logged.add(name)
                log.warning("request field %s is unknown and ignored (said once)", echo(name))


def _object_without_duplicates(text: str) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise bad_field(key[:80], "given twice in one object")
                seen.add(key)
        return value

    found = json.loads(text, object_pairs_hook=pairs)
    return found if isinstance(found, dict) else {}


def _explain_malformed(text: str, message: str) -> ApiError:
    """Names the field of a NaN or of half a surrogate pair, which Python's own parser lets through."""
    try:
        found = json.loads(text, parse_constant=lambda name: (name,))
    except (ValueError, RecursionError):
        return ApiError(400, f"the body is not valid JSON: {message.removeprefix('JSON is malformed: ')}")
    for key, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, tuple):
            return bad_field(key[:80], f"{value[0]} is not a JSON number")
    return ApiError(400, "the body is not valid JSON: it holds NaN, Infinity or half a surrogate pair (\\ud800 … \\udfff)")


def _raise_named(message: str) -> NoReturn:
    match = _AT.match(message)
    what = match["what"] if match else message
    path = (match["path"] or "") if match else ""
    missing = _MISSING.search(what)
    if missing:
        field = f"{path}.{missing['name']}" if path else missing["name"]
        raise bad_field(field, "required, but absent") from None
    mismatch = _MISMATCH.match(what)
    if mismatch:
        wanted = " or ".join(_KINDS.get(k, k) for k in mismatch["wanted"].split(" | "))
        what = f"expected {wanted}, got {_KINDS.get(mismatch['got'], mismatch['got'])}"
    elif what.startswith(("Number out of range", "Integer value out of range")):
        what = "the number is out of range"
    if not path:
        raise ApiError(400, f"the body: {what}") from None
    raise bad_field(path, what) from None
