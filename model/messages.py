"""A conversation as a request gives it: checked, bounded, and brought to the one form templates see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.tool_parser import PREFIX, index_of

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system", "tool": "tool"}
MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # content parts of a message, tool calls of a message, tools of a request
MAX_DEPTH = 64  # nesting of tool arguments and declarations; Python's own parser allows far more
MAX_NODES = 200_000  # JSON values of one tool declaration list or one argument object


class TemplateError(ValueError):
    """A conversation that can not be rendered, or a template that fails; the text names the place and what to change."""


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies of `messages` with only the keys a template reads, and None left out where a text is optional.

    role is one of user, assistant, system, tool (developer becomes system). content is None, a str
    or a list of {"type": "text", "text": str}. reasoning and reasoning_content, name and
    tool_call_id are non-empty strings or absent. tool_calls have id, type and function {name,
    arguments: str | dict}. Ids that are not functions.NAME:IDX, or missing, become it, counted over the
    conversation, and so do the tool_call_ids that refer to them: a model that sees call_… ids writes
    such ids itself. Other keys are dropped. Raises TemplateError naming the message and the field.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages: {type(messages).__name__} where a list of messages is needed")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise TemplateError(f"messages: {len(messages)} entries; 1 to {MAX_MESSAGES} are possible")
    out = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _canonical_ids(out)
    return out


def _canonical_ids(messages: list[dict[str, Any]]) -> None:
    """Rewrites foreign call ids, in place. One id given to several calls of a turn is answered in their order."""
    following = 0
    known: dict[str, list[str]] = {}  # foreign id -> the new ids it stands for, of the newest turn that used it
    for message in messages:
        waiting: dict[str, list[str]] = {}
        for call in message.get("tool_calls", ()):
            given = call["id"]
            index = index_of(given)
            if index < 0:
                call["id"] = f"{PREFIX}{call['function']['name']}:{following}"
                if given:
                    waiting.setdefault(given, []).append(call["id"])
            following = max(following, index) + 1
        known |= waiting
        new = known.get(message.get("tool_call_id", ""))
        if new:
            message["tool_call_id"] = new.pop(0) if len(new) > 1 else new[0]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where}: {type(message).__name__} where an object with role and content is needed")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise TemplateError(f"{where}.role: {role!r} is none of {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    keys = ["name"]
    if role == "assistant":
        keys += ["reasoning", "reasoning_content"]
    if role == "tool":
        keys.append("tool_call_id")
    for key in keys:
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise TemplateError(f"{where}.{key}: {type(value).__name__} where a string is needed")
        if value:
            out[key] = value
    tool_calls = message.get("tool_calls")
    if role == "assistant" and tool_calls:
        out["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls")
    return out


def _content(content: Any, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise TemplateError(f"{where}: {type(content).__name__} where a string, a list of parts or null is needed")
    if len(content) > MAX_PARTS:
        raise TemplateError(f"{where}: {len(content)} parts; at most {MAX_PARTS}")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            named = repr(kind) if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"{where}[{i}]: part of type {named}; only 'text' parts can be read by this model's text path")
        if not isinstance(part.get("text"), str):
            raise TemplateError(f"{where}[{i}].text: {type(part.get('text')).__name__} where a string is needed")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, (list, tuple)):
        raise TemplateError(f"{where}: {type(tool_calls).__name__} where a list of calls is needed")
    if len(tool_calls) > MAX_PARTS:
        raise TemplateError(f"{where}: {len(tool_calls)} calls; at most {MAX_PARTS}")
    out = []
    for i, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise TemplateError(f"{where}[{i}].function: missing; an object with name and arguments is needed")
        name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
        if not isinstance(name, str) or not name:
            raise TemplateError(f"{where}[{i}].function.name: {name!r} where a non-empty string is needed")
        if arguments is None:
            arguments = ""
        if not isinstance(arguments, (str, Mapping)):
            raise TemplateError(f"{where}[{i}].function.arguments: {type(arguments).__name__} where a string or an object is needed")
        if isinstance(arguments, Mapping):
            arguments = check_json(arguments, f"{where}[{i}].function.arguments")
        if call_id is not None and not isinstance(call_id, str):
            raise TemplateError(f"{where}[{i}].id: {type(call_id).__name__} where a string is needed")
        out.append({"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}})
    return out


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A checked copy of the tool declarations. Raises TemplateError naming the entry."""
    if not isinstance(tools, (list, tuple)):
        raise TemplateError(f"tools: {type(tools).__name__} where a list of declarations is needed")
    if len(tools) > MAX_PARTS:
        raise TemplateError(f"tools: {len(tools)} declarations; at most {MAX_PARTS}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TemplateError(f"tools[{i}]: {type(tool).__name__} where an object is needed")
    checked: list[Any] = check_json(tools, "tools")
    return checked


def check_json(value: Any, where: str) -> Any:
    """A copy of `value` made of dict, list, str, int, float, bool and None only.

    Raises TemplateError above 64 levels, 200,000 values, or at any other type.
    """
    left = MAX_NODES

    def copy(node: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateError(f"{where}: more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise TemplateError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        if node is None or isinstance(node, (str, bool, int, float)):
            return node
        if isinstance(node, Mapping):
            if not all(isinstance(key, str) for key in node):
                raise TemplateError(f"{where}: an object key that is no string")
            return {key: copy(item, depth + 1) for key, item in node.items()}
        if isinstance(node, (list, tuple)):
            return [copy(item, depth + 1) for item in node]
        raise TemplateError(f"{where}: a value of type {type(node).__name__}, which is no JSON")

    return copy(value, 0)


def sort_keys(value: Any) -> Any:
    """A copy of a JSON value with the keys of every object sorted; lists keep their order."""
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sort_keys(item) for item in value]
    return value
