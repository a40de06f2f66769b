"""Request strings behind marks, so that a template can place them and never read them as its own text.

A rendered prompt is one string, but only the template may spell control tokens. Before rendering,
every request string is replaced by a mark; afterwards the marks tell request text from template text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

OPEN, CLOSE = "\U000f5a17", "\U000f5a18"  # private use: no template has reason to write them

# Keys that templates look up by name. Any other key is request text like any value.
KNOWN_KEYS = frozenset(
    (
        *("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"),
        *("id", "type", "function", "arguments", "text", "strict", "description", "parameters"),
        *("properties", "required", "items", "enum", "default", "anyOf", "$defs", "$ref", "additionalProperties"),
        *("minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "title", "format"),
    )
)


class RequestText:
    """The marks of one render. They hold 64 random bits, so request text can not imitate one.

    White space at either end of a string stays outside its mark, and an empty string has none:
    `trim`, emptiness and `is string` answer as for the text itself. Equal strings have equal marks.
    """

    def __init__(self, limit_chars: int) -> None:
        self._nonce = secrets.token_hex(8)
        self._mark = re.compile(rf"{OPEN}{self._nonce}\.([0-9]+){CLOSE}")
        self._texts: list[str] = []
        self._index: dict[str, int] = {}
        self._json_left = limit_chars

    def hide(self, text: str) -> str:
        """`text` as the template may see it."""
        core = text.strip()
        if not core:
            return text
        index = self._index.setdefault(core, len(self._texts))
        if index == len(self._texts):
            self._texts.append(core)
        start = len(text) - len(text.lstrip())
        return f"{text[:start]}{OPEN}{self._nonce}.{index}{CLOSE}{text[start + len(core) :]}"

    def hide_all(self, value: Any) -> Any:
        """A JSON value with every string hidden, and every object key that no template looks up."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {key if key in KNOWN_KEYS else self.hide(key): self.hide_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """`text` with its marks replaced by what they stand for."""
        return self._mark.sub(lambda found: self._texts[int(found[1])], text)

    def show_all(self, value: Any) -> Any:
        """Inverse of hide_all."""
        if isinstance(value, str):
            return self.show(value)
        if isinstance(value, Mapping):
            return {self.show(key) if isinstance(key, str) else key: self.show_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.show_all(item) for item in value]
        return value

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | list[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The template's `tojson`: non-ASCII kept, no HTML escapes, strings escaped as their own text and hidden again.

        Raises ValueError once the results of one render exceed the limit.
        """
        pair = None if separators is None else (separators[0], separators[1])
        text = json.dumps(self.show_all(value), ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
        self._json_left -= len(text)
        if self._json_left < 0:
            raise ValueError("tojson: the results exceed the size limit of a prompt")
        return self.hide(text)

    def split(self, rendered: str) -> Iterator[tuple[bool, str]]:
        """(is request text, text) in order. Raises ValueError if the template cut or changed a mark."""
        for i, part in enumerate(self._mark.split(rendered)):
            if i % 2:
                yield True, self._texts[int(part)]
            elif OPEN in part or CLOSE in part:
                raise ValueError("the template slices or rewrites request text, which can not be kept apart from its own then")
            elif part:
                yield False, part
