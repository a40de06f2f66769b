"""Tool calls as a grammar, for answers that must hold some, and the check of what tools declare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from model.grammar import WHITE_SPACE, check_schema
from model.tool_parser import Markers
from runtime.constraint import StructuredOutputs
from runtime.types import InvalidRequest

MAX_SCHEMA_DEPTH = 64  # as model/messages.py bounds declarations
MAX_PATTERN_CHARS = 4096
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def calls_grammar(functions: Mapping[str, Any], markers: Markers, several: bool, answer: Any = None) -> StructuredOutputs:
    """A section of tool calls, each to one of these functions with arguments of its schema; ids count as the model likes.

    functions: name -> JSON schema of the parameters. answer: a JSON schema whose text may stand in place
    of the section. Raises InvalidRequest where the tokenizer lacks the markers.
    """
    ids = (markers.section_begin, markers.call_begin, markers.argument_begin, markers.call_end, markers.section_end)
    if None in ids:
        raise InvalidRequest("tool_choice", "this model has no tool calls")
    section, call, body, call_end, section_end = (f"<[{token}]>" for token in ids)
    rules = ["start: calls" + (" | answer" if answer is not None else "")]
    if answer is not None:
        rules.append(f"answer: %json {json.dumps({'x-guidance': WHITE_SPACE, **check_schema(answer)})}")
    rules.append(f"calls: {section} call{'+' if several else ''} {section_end}")
    rules.append(f"call: {call} one {call_end}")
    rules.append("one: " + " | ".join(f"f{i}" for i in range(len(functions))))
    for i, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f"functions.{name}:", ensure_ascii=False)
        rules.append(f"f{i}: {head} /[0-9]{{1,4}}/ {body} a{i}")
        rules.append(f"a{i}: %json {json.dumps(arguments_schema(schema))}")
    return StructuredOutputs(lark="\n".join(rules) + "\n")


def arguments_schema(schema: Any) -> Any:
    """Parameters as a schema of an object: a declaration may leave its type out, or say nothing at all."""
    if not isinstance(schema, Mapping) or not schema:
        schema = {"type": "object"}
    if not any(key in schema for key in ("type", "$ref", "anyOf", "allOf", "oneOf")):
        schema = {"type": "object", **schema}
    return {"x-guidance": WHITE_SPACE, **schema}


def check_parameters(schema: Any, where: str) -> None:
    """Raises InvalidRequest, field `where`, for parameters that no reader of JSON schemas could make sense of.

    Keywords that are merely unknown pass: where nothing is forced, a declaration is text for the model.
    """
    if schema is None:
        return
    for part, depth in _schemas(schema, where):
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(where, f"nested deeper than {MAX_SCHEMA_DEPTH} levels")
        kind = part.get("type")
        if kind is not None and not isinstance(kind, str):
            if not isinstance(kind, list) or not all(isinstance(one, str) for one in kind):
                raise InvalidRequest(where, f"type {str(kind)[:40]} is neither a name nor a list of names")
        if "pattern" in part:
            _check_pattern(part["pattern"], where)
        if "$ref" in part:
            _check_reference(part["$ref"], schema, where)


def _schemas(schema: Any, where: str) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Every schema inside a schema, with its depth; without recursion, as the depth is not known yet."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise InvalidRequest(where, f"{type(part).__name__} where a JSON schema is needed")
        yield part, depth
        for name in _ONE:
            inner = part.get(name)
            if inner is not None:
                waiting += [(one, depth + 1) for one in (inner if isinstance(inner, list) else (inner,))]
        for name in _LISTS:
            if isinstance(part.get(name), list):
                waiting += [(one, depth + 1) for one in part[name]]
        for name in _MAPS:
            if isinstance(part.get(name), Mapping):
                waiting += [(one, depth + 1) for one in part[name].values()]


def _check_pattern(pattern: Any, where: str) -> None:
    """A pattern must be one for Python or for Rust: JSON schema's own dialect lies between them."""
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(where, f"a pattern that is no string of at most {MAX_PATTERN_CHARS} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError, ValueError):
        from llguidance import LLMatcher

        if LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            raise InvalidRequest(where, f"pattern {pattern[:40]!r} is no regular expression") from None


def _check_reference(ref: Any, root: Any, where: str) -> None:
    if not isinstance(ref, str) or not ref.startswith("#"):
        raise InvalidRequest(where, f"$ref {str(ref)[:60]!r}: only references within the schema, '#/…', are followed")
    target = root
    for step in ref[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, Mapping) and step in target:
            target = target[step]
        else:
            raise InvalidRequest(where, f"$ref {ref[:60]!r} refers to nothing")
