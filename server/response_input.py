"""The input and tools of /v1/responses, as chat takes them."""

from __future__ import annotations

from typing import Any

from server.chat_view import text_of
from server.errors import bad_field, echo

KINDS = {"input_text": "text", "output_text": "text", "text": "text"}


def messages_of(given: str | list[dict[str, Any]], instructions: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation, and the client's name of each message. Reasoning and calls join the assistant's message beside them.

    Raises ApiError 400 naming the item that is something else.
    """
    made: list[dict[str, Any]] = []
    places: list[str] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
        places.append("instructions")
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}], [*places, "input"]
    thought = ""
    for at, item in enumerate(given):
        field, kind = f"input[{at}]", item.get("type", "message")
        if kind == "reasoning":
            thought += text_of(item.get("content") or [], f"{field}.content", {"reasoning_text": "text"})
            continue
        if kind == "function_call" and made and made[-1]["role"] == "assistant" and not thought:
            made[-1].setdefault("tool_calls", []).append(_call(item, field))
            continue
        entry = _entry(item, kind, field)
        if thought and entry["role"] == "assistant":
            entry["reasoning_content"] = thought
        thought = ""
        made.append(entry)
        places.append(field)
    if not given:
        raise bad_field("input", "an empty list; at least one item is needed")
    return made, places


def tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Declarations as chat takes them. Tools that run on the server's side are refused."""
    made = []
    for at, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise bad_field(f"tools[{at}].type", f'{echo(tool.get("type"))} is not supported; "function" is')
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made or None


def tool_choice_of(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """A word, or {"type": "function", "name"}, in chat's form."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise bad_field("tool_choice.type", f'{echo(choice.get("type"))} is not supported; "function" is')
    return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}


def _entry(item: dict[str, Any], kind: object, field: str) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), f"{field}.content", KINDS)}
    if kind == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(item, field)]}
    if kind == "function_call_output":
        said = text_of(item.get("output"), f"{field}.output", KINDS)
        return {"role": "tool", "tool_call_id": _string(item, "call_id", field), "content": said}
    known = "message, reasoning, function_call and function_call_output are"
    raise bad_field(f"{field}.type", f"{echo(kind)} is not supported here; {known}")


def _call(item: dict[str, Any], field: str) -> dict[str, Any]:
    function = {"name": _string(item, "name", field), "arguments": _string(item, "arguments", field)}
    return {"id": _string(item, "call_id", field), "type": "function", "function": function}


def _string(item: dict[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{field}.{name}", "want a string")
    return value
