"""Random JSON schemas whose texts are short, and an independent judge of values."""

from __future__ import annotations

import json
import random
import re
from typing import Any

WORDS = ("a", "id", "name", "é", "x y", "k0", "日")
TIGHT = {"whitespace_pattern": r"[ ]{1,2}"}  # a random model would write white space for long


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of at most three levels; every text it allows is below about 200 characters."""
    kinds = ["string", "pattern", "integer", "boolean", "null", "enum", "const"]
    if depth < 2:
        kinds += ["object", "object", "array", "anyOf", "optional"]
    kind = rng.choice(kinds) if depth else rng.choice(["object", "object", "array", *kinds])
    schema: dict[str, Any]
    if kind == "string":
        schema = {"type": "string", "maxLength": rng.randint(0, 6)}
    elif kind == "pattern":
        schema = {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^(yes|no)$", "^[0-9]{2}-[A-Z]$"])}
    elif kind == "integer":
        low = rng.randint(-50, 50)
        schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)}
    elif kind == "enum":
        schema = {"enum": rng.sample(["red", "grün", 7, 2.5, None, True, "a b"], rng.randint(1, 4))}
    elif kind == "const":
        schema = {"const": rng.choice(["only", 12, None, [1, "x"]])}
    elif kind in ("object", "optional"):
        names = rng.sample(WORDS, rng.randint(0, 3))
        fields = {name: random_schema(rng, depth + 1) for name in names}
        required = names if kind == "object" else names[:1]
        schema = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    elif kind == "array":
        low = rng.randint(0, 2)
        schema = {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    elif kind == "anyOf":
        schema = {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    else:
        schema = {"type": kind}
    return schema if depth else {**schema, "x-guidance": TIGHT}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a random schema's, by the words of the standard."""
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(json.dumps(value) == json.dumps(one) for one in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "string":
        held = isinstance(value, str) and len(value) <= schema.get("maxLength", 1000)
        return held and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]
    if kind == "array":
        right = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return right and all(conforms(item, schema["items"]) for item in value)
    if kind == "object":
        fields = schema["properties"]
        right = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(fields)
        return right and all(conforms(item, fields[name]) for name, item in value.items())
    return value is None if kind == "null" else isinstance(value, bool)
