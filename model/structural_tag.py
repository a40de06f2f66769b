"""Structural tags: free text in which whatever opens a tag must be held to the tag's schema and then closed.

The form is the one that vLLM and SGLang take as response_format: structures of begin, schema and end, and the triggers that
the begins start with. llguidance turns it into a grammar of lazy lexemes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.grammar import WHITE_SPACE, check_schema
from runtime.constraint import StructuredOutputs
from runtime.types import InvalidRequest

MAX_TAGS = 128
MAX_TAG_CHARS = 256


def tags_grammar(structures: Any, triggers: Any, field: str) -> StructuredOutputs:
    """The grammar of a text with tags. Raises InvalidRequest, under `field`, for what is malformed."""
    from llguidance import StructTag

    if not isinstance(triggers, Sequence) or isinstance(triggers, str) or not 0 < len(triggers) <= MAX_TAGS:
        raise InvalidRequest(f"{field}.triggers", f"a list of 1 to {MAX_TAGS} strings is needed")
    starts = [_text(trigger, f"{field}.triggers[{at}]", empty=False) for at, trigger in enumerate(triggers)]
    if not isinstance(structures, Sequence) or isinstance(structures, str) or not 0 < len(structures) <= MAX_TAGS:
        raise InvalidRequest(f"{field}.structures", f"a list of 1 to {MAX_TAGS} structures is needed")
    tags = []
    for at, one in enumerate(structures):
        here = f"{field}.structures[{at}]"
        if not isinstance(one, Mapping):
            raise InvalidRequest(here, "an object with begin, schema and end is needed")
        begin = _text(one.get("begin"), f"{here}.begin", empty=False)
        end = _text(one.get("end", ""), f"{here}.end", empty=True)
        opens = [trigger for trigger in starts if begin.startswith(trigger)]
        if not opens:
            raise InvalidRequest(f"{here}.begin", f"{begin[:80]!r} starts with none of the triggers")
        try:
            schema = check_schema(one.get("schema", {}))
        except InvalidRequest as error:
            raise InvalidRequest(f"{here}.schema", str(error).partition(": ")[2]) from None
        tags.append(StructTag(trigger=max(opens, key=len), begin=begin, grammar={"x-guidance": WHITE_SPACE, **schema}, end=end))
    return StructuredOutputs(lark=StructTag.to_grammar(tags, assume_special=False))


def _text(text: Any, field: str, empty: bool) -> str:
    if not isinstance(text, str) or len(text) > MAX_TAG_CHARS or not (text or empty):
        raise InvalidRequest(field, f"a string of {0 if empty else 1} to {MAX_TAG_CHARS} characters is needed")
    return text
