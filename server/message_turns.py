"""The conversation and tools of /v1/messages, as chat takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from server.chat_view import text_of
from server.errors import bad_field, echo

KINDS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}


def turn(role: str, content: object, field: str) -> list[dict[str, Any]]:
    """The chat messages of one turn; results of tools come before the user's own words.

    Raises ApiError 400 naming the part that is something else.
    """
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, field, {"text": "text"})}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for at, part in enumerate(content):
        kind, here = (part.get("type") if isinstance(part, dict) else None), f"{field}[{at}]"
        if kind not in KINDS[role]:
            raise bad_field(f"{here}.type", f"{echo(kind)} is not supported here; {' or '.join(KINDS[role])} is")
        if kind == "tool_use":
            if not isinstance(part.get("input"), dict):
                raise bad_field(f"{here}.input", "want an object")
            call = {"name": _string(part, "name", here), "arguments": msgspec.json.encode(part["input"]).decode()}
            calls.append({"id": _string(part, "id", here), "type": "function", "function": call})
        elif kind == "tool_result":
            said = text_of(part.get("content") or "", f"{here}.content", {"text": "text"})
            results.append({"role": "tool", "tool_call_id": _string(part, "tool_use_id", here), "content": said})
        else:
            texts[kind].append(_string(part, kind, here))
    entry: dict[str, Any] = {"role": role, "content": "".join(texts["text"])}
    if texts["thinking"]:
        entry["reasoning_content"] = "".join(texts["thinking"])
    if calls:
        entry["tool_calls"] = calls
    return [*results, entry] if texts["text"] or not results else results


def tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Declarations as chat takes them. Tools that run on the server's side are refused."""
    made = []
    for at, tool in enumerate(tools or ()):
        if tool.get("type") not in (None, "custom"):
            raise bad_field(f"tools[{at}].type", f"{echo(tool['type'])} is not supported; only tools of your own are")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        made.append({"type": "function", "function": function})
    return made or None


def tool_choice_of(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    """auto, any, none, or {"type": "tool", "name"}, in chat's words."""
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    words = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in words:
        raise bad_field("tool_choice.type", f"{echo(kind)} is none of auto, any, tool, none")
    return words[kind]


def _string(part: dict[str, Any], name: str, field: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{field}.{name}", "want a string")
    return value
