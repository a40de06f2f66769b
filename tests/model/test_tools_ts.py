"""Tool declarations: the expected text is written by hand from the described rules."""

from __future__ import annotations

from typing import Any

import pytest

from model.messages import sort_keys
from model.tools_ts import SchemaError, declare


def one(parameters: Any, **more: Any) -> str:
    """The declaration of one function f, without the namespace around it."""
    text = declare([{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def field(schema: Any) -> str:
    """The one required parameter x of a function."""
    text = one({"type": "object", "properties": {"x": schema}, "required": ["x"]})
    head, tail = "type f = (_: {\n", "\n}) => any;"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def test_the_declaration_of_the_reference_prompt() -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city"}}, "required": ["city"]},
        },
    }
    assert declare([weather]) == (
        "# Tools\n\n## functions\nnamespace functions {\n// Get the current weather of a city\n"
        "type get_weather = (_: {\n  // The city\n  city: string\n}) => any;\n}\n"
    )


def test_functions_are_joined_by_newlines_and_other_tools_left_out() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "b"}},
        {"type": "web_search", "web_search": {}},
        {"type": "function", "function": {"name": "a", "description": "one\n\ntwo", "parameters": {}}},
    ]
    assert declare(tools) == (
        "# Tools\n\n## functions\nnamespace functions {\ntype b = (_: {}) => any;\n// one\n\n// two\ntype a = (_: {}) => any;\n}\n"
    )
    assert declare([]) == declare(tools[1:2]) == ""


def test_required_first_then_by_name() -> None:
    properties = {name: {"type": "integer"} for name in ("d", "a", "c", "b")}
    assert one({"type": "object", "properties": properties, "required": ["d", "b"]}) == (
        "type f = (_: {\n  b: number,\n  d: number,\n  a?: number,\n  c?: number\n}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "  x: string"),
        ({"type": "boolean"}, "  x: boolean"),
        ({"type": "null"}, "  x: null"),
        ({"type": "number"}, "  x: number"),
        ({"type": "integer"}, "  x: number"),
        ({}, "  x: any"),
        (True, "  x: any"),
        (False, "  x: null"),
        ({"enum": ["a", 'b"c', 1, 2.5, True, None]}, '  x: "a" | "b"c" | 1 | 2.5 | True | None'),
        ({"type": "string", "enum": ["a", None]}, '  x: "a" | None'),
        ({"type": ["string", "null"], "enum": ["a", None]}, '  x: "a" | None'),
        ({"type": ["string", "integer", "null", "array", "object"]}, "  x: string | number | null | Array<any> | {}"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, "  x: string | Array<number>"),
        ({"type": "array"}, "  x: Array<any>"),
        ({"type": "array", "items": {}}, "  x: Array<any>"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, "  x: Array<Array<string>>"),
        (
            {"type": "array", "items": {"type": "object", "properties": {"y": {"type": "string"}}}},
            "  x: Array<{\n    y?: string\n  }>",
        ),
        ({"type": "object"}, "  x: {}"),
        ({"type": "object", "additionalProperties": True}, "  x: {\n    [k: string]: any\n  }"),
        ({"type": "object", "additionalProperties": False}, "  x: {\n    [k: string]: never\n  }"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "  x: {\n    [k: string]: number\n  }"),
        (
            {"type": "object", "properties": {"y": {"type": "object", "properties": {"z": {"type": "string", "description": "d"}}}}},
            "  x: {\n    y?: {\n      // d\n      z?: string\n    }\n  }",
        ),
    ],
)
def test_types(schema: Any, text: str) -> None:
    assert field(schema) == text


@pytest.mark.parametrize(
    ("schema", "comment"),
    [
        ({"type": "string", "description": "one\n\ntwo"}, "  // one\n\n  // two\n"),
        ({"type": "string", "pattern": "a+", "minLength": 1, "maxLength": 3}, "  // maxLength: 3, minLength: 1, pattern: a+\n"),
        ({"type": "integer", "minimum": 0, "maximum": 9, "description": "d"}, "  // d\n  // maximum: 9, minimum: 0\n"),
        ({"type": "number", "minimum": 0.5, "pattern": "no"}, "  // minimum: 0.5\n"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n'),
        ({"type": "boolean", "default": False, "description": "d"}, "  // d\n  // Default: False\n"),
        ({"type": "number", "default": 1.0}, "  // Default: 1.0\n"),
        ({"type": "array", "default": ["a", 1], "minItems": 1, "maxItems": 2}, '  // maxItems: 2, minItems: 1\n  // Default: ["a", 1]\n'),
        ({"type": "string", "default": None}, ""),
        ({"type": "string", "enum": ["a"], "maxLength": 3, "description": "d"}, "  // d\n"),
    ],
)
def test_comments(schema: Any, comment: str) -> None:
    text = field(schema)
    assert text.startswith(comment + "  x: ") and text.count("\n") == comment.count("\n")


def test_items_with_a_comment_stand_on_their_own_lines() -> None:
    assert field({"type": "array", "items": {"type": "string", "description": "d", "maxLength": 2}}) == (
        "  x: Array<\n    // d\n    // maxLength: 2\n    string\n  >"
    )


def test_definitions_become_interfaces() -> None:
    parameters = {
        "$defs": {
            "Leaf": {"type": "object", "properties": {"v": {"type": "string"}}},
            "Node": {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}},
        },
        "properties": {"n": {"$ref": "#/$defs/Node", "description": "start"}, "l": {"$ref": "#/$defs/Leaf"}},
        "required": ["n"],
    }
    assert one(parameters, description="Walk") == (
        "interface Leaf {\n  v?: string\n}\n"
        "// A node\ninterface Node {\n  next?: Node\n}\n"
        "// Walk\ntype f = (_: {\n  // start\n  n: Node,\n  l?: Leaf\n}) => any;"
    )


def test_parameters_that_refer_to_themselves_get_a_name() -> None:
    parameters = {"properties": {"b": {"type": "string"}, "a": {"$ref": "#"}}, "required": ["a"]}
    assert one(parameters) == "interface parameters {\n  b?: string,\n  a: parameters\n}\ntype f = (_: parameters) => any;"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": 7}, "type: 7"),
        ({"description": "no type"}, "type: None"),
        ({"type": ["string", "date"]}, "'date'"),
        ({"$ref": "#/$defs/Nothing"}, "names no entry"),
        ({"$ref": "http://example.org/x"}, "only '#' and"),
        ({"type": "integer", "enum": ["a"]}, "enum: 'a' is no integer"),
        ({"type": ["string", "integer"], "enum": ["a"]}, "of an enum"),
        ({"enum": "abc"}, "enum: str"),
        ({"anyOf": {}}, "anyOf: dict"),
        ({"type": "object", "$defs": {"A": True}}, r"\$defs.A: bool"),
        ({"type": "object", "$defs": [1]}, r"\$defs: list"),
        ({"type": "object", "properties": []}, "properties: list"),
        ({"type": "object", "properties": {"a": {}}, "required": True}, "required: bool"),
        ({"type": "object", "additionalProperties": 1}, "schema: int"),
        ({"type": "string", "description": 3}, "description: int"),
        (None, "schema: NoneType"),
    ],
)
def test_what_has_no_form_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        field(schema)


def test_sort_keys() -> None:
    value = {"b": [{"d": 1, "c": 2}], "a": {"f": None, "e": [2, 1]}}
    assert list(sort_keys(value)) == ["a", "b"]
    assert str(sort_keys(value)) == "{'a': {'e': [2, 1], 'f': None}, 'b': [{'c': 2, 'd': 1}]}"
