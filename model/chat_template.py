"""Chat messages to token ids through the checkpoint's own template.

The template comes from the checkpoint and from nowhere else. It runs in minijinja, which refuses
Python's underscore names and stops when its fuel is spent; lists and objects it sees are copies made
for that render. Text of the request never becomes a control token, in whatever field it stands
(model/request_text.py).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import minijinja

from model.messages import TemplateError as TemplateError
from model.messages import check_json, check_tools, normalise, sort_keys
from model.request_text import CLOSE, OPEN, RequestText
from model.tokenizer import Tokenizer
from model.tools_ts import SchemaError, declare

# Measured on the demo template: 70 instructions a message, 60 million a second. 10 million are
# 0.17 s at worst and 140,000 messages at best.
FUEL = 10_000_000
MAX_PROMPT_CHARS = 8 << 20  # 262,144 tokens of context at 32 characters each
MAX_TEMPLATE_CHARS = 1 << 20
MAX_KWARGS = 32
MAX_WORD_CHARS = 64
MAX_REASON_CHARS = 500  # a template may quote the request in its own error

_WORD = re.compile(rf"[A-Za-z0-9_.-]{{0,{MAX_WORD_CHARS}}}")
_OWN_NAMES = frozenset({"messages", "tools", "tools_ts_str", "add_generation_prompt", "raise_exception", "strftime_now"})
_SWITCHES = ("thinking", "enable_thinking", "preserve_thinking")


class ChatTemplate:
    """One checkpoint's template with its tokenizer; holds nothing of a request, so threads may share it."""

    def __init__(self, source: str, tokenizer: Tokenizer, origin: str = "chat template") -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"{origin}: {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
        for mark in (OPEN, CLOSE):
            if mark in source:
                raise TemplateError(f"{origin}: holds U+{ord(mark):X}, which marks request text here; take it out")
        spaced = [name for name in tokenizer.special if re.search(r"\s", name)]
        if spaced:
            raise TemplateError(f"{origin}: the special token {spaced[0]!r} holds white space, so text of a request could complete it")
        self._source = source
        self._origin = origin
        self._tokenizer = tokenizer
        # Longest first: of two specials that begin alike the longer is meant.
        names = sorted(tokenizer.special, key=len, reverse=True)
        self._specials = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self._environment(RequestText(0))

    @classmethod
    def load(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Reads chat_template.jinja, or else "chat_template" of tokenizer_config.json.

        Raises TemplateError naming the file when there is none or when it does not compile.
        """
        folder = Path(directory)
        path = folder / "chat_template.jinja"
        if path.exists():
            return cls(path.read_text(encoding="utf-8"), tokenizer, path.name)
        path = folder / "tokenizer_config.json"
        value = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.exists() else None
        if isinstance(value, list):  # several named templates
            value = next((entry.get("template") for entry in value if isinstance(entry, dict) and entry.get("name") == "default"), None)
        if not isinstance(value, str):
            raise TemplateError(f"{folder}: no chat_template.jinja and no chat_template string in tokenizer_config.json; chat needs one")
        return cls(value, tokenizer, f"{path.name}, chat_template")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        thinking (alias enable_thinking, default True) and preserve_thinking (default False) are the
        switches of Kimi's template; other keyword arguments reach it as they are. Special tokens are
        read in the template's own text only; neighbouring text of both kinds is joined before BPE,
        so the ids equal those of the rendered prompt wherever no request text spells a special.
        Raises TemplateError.
        """
        pieces: list[str | int] = []
        for from_request, text in self._parts(messages, tools, add_generation_prompt, template_kwargs):
            if from_request:
                pieces.append(text)
                continue
            for i, part in enumerate(self._specials.split(text)):
                pieces.append(self._tokenizer.special[part] if i % 2 else part)
        return self._tokenizer.encode_pieces(pieces)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt as text, for reading and for tests; encoding it again would trust request text. Raises TemplateError."""
        return "".join(text for _, text in self._parts(messages, tools, add_generation_prompt, template_kwargs))

    def _parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> list[tuple[bool, str]]:
        hidden = RequestText(MAX_PROMPT_CHARS)
        context = _context(messages, add_generation_prompt, template_kwargs, hidden)
        if tools:
            context |= self._tool_context(tools, hidden)
        environment = self._environment(hidden)
        try:
            rendered = environment.render_template("chat", **context)
            parts = list(hidden.split(rendered))
        except minijinja.TemplateError as error:
            raise TemplateError(f"{self._origin}, {hidden.show(_reason(error))[:MAX_REASON_CHARS]}") from error
        except TemplateError:
            raise
        except (ValueError, TypeError, RecursionError) as error:  # of the functions that the template calls, and of split
            raise TemplateError(f"{self._origin}: {error}") from error
        total = sum(len(text) for _, text in parts)
        if total > MAX_PROMPT_CHARS:
            raise TemplateError(f"messages: the prompt has {total} characters; at most {MAX_PROMPT_CHARS}. Shorten the conversation")
        return parts

    def _tool_context(self, tools: Sequence[Mapping[str, Any]], hidden: RequestText) -> dict[str, Any]:
        """tools, and tools_ts_str for templates that read it: those models saw object keys sorted and TypeScript."""
        declared = check_tools(tools)
        if "tools_ts_str" not in self._source:
            return {"tools": hidden.hide_all(declared)}
        declared = sort_keys(declared)
        context: dict[str, Any] = {"tools": hidden.hide_all(declared)}
        # A schema without a TypeScript form: the template writes the sorted JSON, as with Kimi's own code.
        with contextlib.suppress(SchemaError):
            context["tools_ts_str"] = hidden.hide(declare(declared))
        return context

    def _environment(self, hidden: RequestText) -> minijinja.Environment:
        """A compiled environment for one render (36 µs): fuel and marks belong to it alone, so renders need no lock."""

        def raise_exception(message: Any = "") -> NoReturn:
            reason = hidden.show(str(message))[:MAX_REASON_CHARS]
            raise TemplateError(f"messages: the chat template refuses this conversation: {reason}")

        def strftime_now(pattern: str) -> str:
            return datetime.now().strftime(pattern)

        environment = minijinja.Environment(
            filters={"tojson": hidden.tojson},
            globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
            fuel=FUEL,
            trim_blocks=True,
            lstrip_blocks=True,
            debug=True,  # names the undefined variable
        )
        try:
            environment.add_template("chat", self._source)  # compiles now; the `templates` argument would wait for the first render
        except minijinja.TemplateError as error:
            raise TemplateError(f"{self._origin}, {_reason(error)}") from error
        return environment


def _reason(error: minijinja.TemplateError) -> str:
    return f"line {error.line}: {error.detail or error.message}"


def _context(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
    hidden: RequestText,
) -> dict[str, Any]:
    context: dict[str, Any] = _switches(template_kwargs)
    for name, value in template_kwargs.items():
        if name in _OWN_NAMES:
            raise TemplateError(f"chat_template_kwargs: {name} is set by the server itself; leave it out")
        if name not in _SWITCHES:
            context[name] = _kwarg(name, value, hidden)
    context["messages"] = [_hide_message(message, hidden) for message in normalise(messages)]
    context["add_generation_prompt"] = bool(add_generation_prompt)
    return context


def _switches(template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(template_kwargs) > MAX_KWARGS:
        raise TemplateError(f"chat_template_kwargs: {len(template_kwargs)} entries; at most {MAX_KWARGS}")
    given = {}
    for name in _SWITCHES:
        value = template_kwargs.get(name)
        if value is not None and not isinstance(value, bool):
            raise TemplateError(f"chat_template_kwargs.{name}: {value!r} where true or false is needed")
        if value is not None:
            given[name] = value
    thinking = given.get("thinking", given.get("enable_thinking", True))
    return {"thinking": thinking, "enable_thinking": thinking, "preserve_thinking": given.get("preserve_thinking", False)}


def _kwarg(name: str, value: Any, hidden: RequestText) -> Any:
    """A word such as "high" passes as it is, so that the template can compare it; longer text is request text."""
    if not name.isidentifier() or len(name) > MAX_WORD_CHARS:
        raise TemplateError(f"chat_template_kwargs: {name[:MAX_WORD_CHARS]!r} is no name of at most {MAX_WORD_CHARS} characters")
    value = check_json(value, f"chat_template_kwargs.{name}")
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value
    return hidden.hide_all(value)


def _hide_message(message: dict[str, Any], hidden: RequestText) -> dict[str, Any]:
    """Hides every string but role and the two type words, which come from closed lists."""
    out = dict(message)
    for key in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if key in out:
            out[key] = hidden.hide(out[key])
    content = out["content"]
    if isinstance(content, str):
        out["content"] = hidden.hide(content)
    elif content is not None:
        out["content"] = [{"type": "text", "text": hidden.hide(part["text"])} for part in content]
    if "tool_calls" in out:
        out["tool_calls"] = [
            {"id": hidden.hide(call["id"]), "type": "function", "function": hidden.hide_all(call["function"])} for call in out["tool_calls"]
        ]
    return out
