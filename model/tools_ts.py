"""Tool declarations as the TypeScript that Kimi K2.5 and later were trained on.

A function with JSON-schema parameters becomes `type NAME = (_: { fields }) => any;` inside
`namespace functions`, with descriptions, constraints and defaults as comments. Numbers, booleans
and defaults are written as Python writes them (`True`, `None`): the models saw them so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

INDENT = "  "
NAMES = {"integer": "number"}  # JSON-schema type → TypeScript, where they differ
UNION_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
ENUM_CHECKS: dict[str, type | tuple[type, ...]] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


class SchemaError(ValueError):
    """A tool schema that has no TypeScript form here; callers fall back to JSON."""


def declare(tools: Sequence[Mapping[str, Any]]) -> str:
    """TypeScript for OpenAI tool declarations [{"type": "function", "function": {…}}]; "" if none is a function.

    Object keys are expected in the order in which they should count (sorted, for Kimi): only
    interface fields and $defs keep it, parameters are sorted with the required ones first.
    Raises SchemaError where a schema is malformed or uses what has no rule.
    """
    functions = [_function(tool["function"]) for tool in tools if tool.get("type") == "function" and tool.get("function")]
    if not functions:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


class _Scope:
    """What one function's schemas have declared so far."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False


def _function(function: Any) -> str:
    if not isinstance(function, Mapping):
        raise SchemaError(f"function: {type(function).__name__} where an object is needed")
    scope = _Scope()
    root = function.get("parameters") or {}
    if not isinstance(root, Mapping):
        raise SchemaError(f"parameters: {type(root).__name__} where an object is needed")
    body = _object(root, "", scope)
    lines = []
    if scope.refers_to_root:
        # "$ref": "#" names the parameters themselves, so they need a name; their fields keep the given order.
        fields = ",\n".join(_fields(root, INDENT, scope, ordered=lambda names, _: list(names)))
        lines.append("interface parameters {" + (f"\n{fields}\n" if fields else "") + "}")
        body = "parameters"
    for name, schema in list(scope.definitions.items()):
        if not isinstance(schema, Mapping):
            raise SchemaError(f"$defs.{name}: {type(schema).__name__} where an object is needed")
        text = f"interface {name} {_type(schema, '', scope)}"
        lines.append(_comment(_description(schema), "") + text)
    description = _text(function.get("description"), "description")
    if description:
        lines.append(_comment(description, "")[:-1])
    lines.append(f"type {_text(function.get('name', 'function'), 'name')} = (_: {body}) => any;")
    return "\n".join(lines)


def _type(schema: Any, indent: str, scope: _Scope) -> str:
    """The TypeScript type of a JSON schema; lines after its first are indented by `indent`."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if not isinstance(schema, Mapping):
        raise SchemaError(f"schema: {type(schema).__name__} where an object or a boolean is needed")
    if "$ref" in schema:
        return _reference(schema["$ref"], scope)
    if "anyOf" in schema:
        return " | ".join(_type(choice, indent, scope) for choice in _list(schema["anyOf"], "anyOf"))
    if "enum" in schema:
        return _enum(schema)
    if not schema:
        return "any"
    kind = schema.get("type")
    if isinstance(kind, list):
        unknown = [name for name in kind if not isinstance(name, str) or name not in UNION_NAMES]
        if unknown:
            raise SchemaError(f"type: {unknown[0]!r} is none of {', '.join(UNION_NAMES)}")
        return " | ".join(UNION_NAMES[name] for name in kind)
    if kind == "object":
        return _object(schema, indent, scope)
    if kind == "array":
        return _array(schema, indent, scope)
    if not isinstance(kind, str):
        raise SchemaError(f"type: {kind!r} where a name, a list of names, anyOf, enum or $ref is needed")
    return NAMES.get(kind, kind)


def _object(schema: Mapping[str, Any], indent: str, scope: _Scope) -> str:
    inner = indent + INDENT
    definitions = schema.get("$defs") or {}
    if not isinstance(definitions, Mapping):
        raise SchemaError(f"$defs: {type(definitions).__name__} where an object is needed")
    scope.definitions.update(definitions)
    extra = schema.get("additionalProperties")
    extra_type = None
    if isinstance(extra, bool):
        extra_type = "any" if extra else "never"
    elif extra is not None:
        extra_type = _type(extra, inner, scope)
    fields = _fields(schema, inner, scope, ordered=_required_first)
    if extra_type is not None:
        fields.append(f"{inner}[k: string]: {extra_type}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _fields(schema: Mapping[str, Any], indent: str, scope: _Scope, ordered: Callable[[Mapping[str, Any], Any], list[str]]) -> list[str]:
    if "properties" not in schema:
        return []
    properties, required = schema["properties"], _list(schema.get("required", []), "required")
    if not isinstance(properties, Mapping):
        raise SchemaError(f"properties: {type(properties).__name__} where an object is needed")
    fields = []
    for name in ordered(properties, required):
        field = properties[name]
        comment = _docs(field, indent)
        default = field.get("default") if isinstance(field, Mapping) else None
        if default is not None:
            shown = repr(default) if isinstance(default, (bool, int, float)) else json.dumps(default, ensure_ascii=False)
            comment += f"{indent}// Default: {shown}\n"
        fields.append(f"{comment}{indent}{name}{'' if name in required else '?'}: {_type(field, indent, scope)}")
    return fields


def _required_first(properties: Mapping[str, Any], required: Any) -> list[str]:
    return sorted(properties, key=lambda name: (name not in required, name))


def _array(schema: Mapping[str, Any], indent: str, scope: _Scope) -> str:
    items = schema.get("items")
    if not items:  # absent, null, {} and false alike
        return "Array<any>"
    inner = indent + INDENT
    docs = _docs(items, inner)
    if not docs:
        return f"Array<{_type(items, indent, scope)}>"
    return f"Array<\n{docs}{inner}{_type(items, inner, scope)}\n{indent}>"


def _enum(schema: Mapping[str, Any]) -> str:
    values = _list(schema["enum"], "enum")
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [name for name in kind if name != "null"]
        if len(kind) > 2 or (len(kind) == 2 and len(named) == 2) or not kind:
            raise SchemaError(f"type: {kind!r} of an enum; one name, or one name and null, is possible")
        kind = named[0] if named else "null"
    check = ENUM_CHECKS.get(kind) if isinstance(kind, str) else None
    for value in values:
        if check is not None and value is not None and not isinstance(value, check):
            raise SchemaError(f"enum: {value!r} is no {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _reference(ref: Any, scope: _Scope) -> str:
    if ref == "#":
        scope.refers_to_root = True
        return "parameters"
    if not isinstance(ref, str) or not ref.startswith("#/$defs/"):
        raise SchemaError(f"$ref: {ref!r}; only '#' and '#/$defs/NAME' are possible")
    name = ref.rsplit("/", 1)[-1]
    if name not in scope.definitions:
        raise SchemaError(f"$ref: {ref!r} names no entry of $defs ({', '.join(scope.definitions) or 'empty'})")
    return name


def _docs(schema: Any, indent: str) -> str:
    """Comment lines of a schema: its description, then its constraints in the order of their names."""
    if not isinstance(schema, Mapping):
        return ""
    text = _comment(_description(schema), indent)
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type")
    keys = CONSTRAINTS.get(kind, ()) if plain and isinstance(kind, str) else ()
    found = [f"{key}: {schema[key]}" for key in keys if key in schema]
    return text + (f"{indent}// {', '.join(found)}\n" if found else "")


def _description(schema: Mapping[str, Any]) -> str:
    return _text(schema.get("description"), "description")


def _comment(text: str, indent: str) -> str:
    """`text` as comment lines, each ended by a newline; an empty line stays empty. Nothing for no text."""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""


def _text(value: Any, field: str) -> str:
    if not value:
        return ""
    if not isinstance(value, str):
        raise SchemaError(f"{field}: {type(value).__name__} where a string is needed")
    return value


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(f"{field}: {type(value).__name__} where a list is needed")
    return value
