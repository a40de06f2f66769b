"""Kimi's tool calls in a generated token stream: which tokens are what, and the calls that they make.

Everything is decided by token id. A marker spelled in ordinary tokens is text, and a run that holds the
end of one call and the beginning of the next is two tokens like any others: nothing depends on how
tokens are grouped. Two parts, because text reaches a server later than its tokens do:

    OutputMachine   token -> which part of the answer its text belongs to
    ToolCalls       parts and their text -> calls, as pieces that can be streamed
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

PREFIX = "functions."
CALL_ID = re.compile(r"functions\.(?P<name>.+):(?P<index>[0-9]{1,9})", re.DOTALL)
_INDEX = re.compile(r":[0-9]*$")


class Part(Enum):
    """Where text belongs. The last three are marks without text: a call begins, its arguments begin, it ends."""

    REASONING = auto()
    CONTENT = auto()
    HEADER = auto()  # functions.NAME:IDX
    ARGUMENTS = auto()
    DROPPED = auto()  # markers, and what a model writes between them
    CALL = auto()
    BODY = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids of a checkpoint's control tokens; None where it has none."""

    think_begin: int | None = None
    think_end: int | None = None
    section_begin: int | None = None
    section_end: int | None = None
    call_begin: int | None = None
    argument_begin: int | None = None
    call_end: int | None = None

    @staticmethod
    def of(special: Mapping[str, int]) -> Markers:
        """Resolved by string: ids differ between checkpoints of the family."""
        return Markers(
            think_begin=special.get("<think>"),
            think_end=special.get("</think>"),
            section_begin=special.get("<|tool_calls_section_begin|>"),
            section_end=special.get("<|tool_calls_section_end|>"),
            call_begin=special.get("<|tool_call_begin|>"),
            argument_begin=special.get("<|tool_call_argument_begin|>"),
            call_end=special.get("<|tool_call_end|>"),
        )

    def ids(self) -> frozenset[int]:
        found = (
            self.think_begin,
            self.think_end,
            self.section_begin,
            self.section_end,
            self.call_begin,
            self.argument_begin,
            self.call_end,
        )
        return frozenset(token for token in found if token is not None)


class OutputMachine:
    """The state of one answer; one for each request.

    Reasoning begins with the prompt, or with <think> as the first token (K2-Thinking's prompt does not
    open it). REASONING and CONTENT last until a section or a call begins; then text is header or arguments of a
    call, and dropped everywhere else, after the section too. A call ends at its own end, at the next
    call's begin or at the section's end, whichever comes. </think> and the section marker end reasoning. With
    tools False only that last rule holds, and tool markers are content.
    """

    __slots__ = ("_first", "_markers", "_tools", "reasoning_tokens", "state")

    def __init__(self, markers: Markers, in_reasoning: bool, tools: bool) -> None:
        self._markers = markers
        self._tools = tools
        self._first = True
        self.state = Part.REASONING if in_reasoning else Part.CONTENT
        self.reasoning_tokens = 0

    @property
    def settled(self) -> bool:
        """Whether no token can change the state any more."""
        return self.state is Part.CONTENT and not self._tools and not self._first

    def step(self, token: int) -> tuple[Part, Part | None]:
        """(the part that the token's own text belongs to, a mark that stands right before it or None)."""
        ids, state = self._markers, self.state
        first, self._first = self._first, False
        if first and token == ids.think_begin:
            self.state = Part.REASONING
            return Part.DROPPED, None
        if token == ids.think_end and state in (Part.REASONING, Part.CONTENT):
            self.state = Part.CONTENT
            return Part.DROPPED, None
        if not self._tools:
            if token == ids.section_begin:
                self.state = Part.CONTENT
            elif state is Part.REASONING:
                self.reasoning_tokens += 1
            return self.state, None
        if token == ids.call_begin:
            self.state = Part.HEADER
            return Part.DROPPED, Part.CALL
        if token == ids.section_begin or token == ids.section_end or token == ids.call_end:
            if state in (Part.HEADER, Part.ARGUMENTS):
                self.state = Part.DROPPED
                return Part.DROPPED, Part.END
            if token != ids.call_end:
                self.state = Part.DROPPED if token == ids.section_begin or state is Part.DROPPED else state
            return Part.DROPPED, None
        if token == ids.argument_begin:
            if state is Part.HEADER:
                self.state = Part.ARGUMENTS
                return Part.DROPPED, Part.BODY
            return Part.DROPPED, None
        if state is Part.REASONING:
            self.reasoning_tokens += 1
        return state, None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call. The first one of a call, its slot, has id and name; the others have arguments alone."""

    index: int  # of the call in this answer
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ToolCalls:
    """The calls of one answer, out of parts in their order.

    functions: declared name -> names of its parameters. first_index: how many calls the conversation
    holds already; ids are functions.NAME:(first_index + index), whatever index the model wrote. A call
    is announced as soon as its name is certain: a header that names no function (a bare counter,
    call_… ids out of a foreign history) waits for its arguments, whose keys then tell.
    """

    def __init__(self, functions: Mapping[str, frozenset[str]], first_index: int = 0) -> None:
        self._functions = functions
        self._first = first_index
        self._header: list[str] = []
        self._arguments: list[str] = []
        self._open = self._in_body = self._announced = False
        self.count = 0
        self.complete = True  # False: the last call was cut off before its arguments were whole JSON

    def push(self, part: Part, text: str = "") -> list[CallDelta]:
        """What this part makes certain. Parts that are none of a call's are passed over."""
        if part is Part.CALL:
            deltas = self._close(True)
            self._header, self._arguments = [], []
            self._open, self._in_body, self._announced = True, False, False
            return deltas
        if not self._open:
            return []
        if part is Part.HEADER:
            self._header.append(text)
        elif part is Part.BODY:
            self._in_body = True
            name = resolve("".join(self._header), self._functions)
            return [] if name is None else [self._announce(name)]
        elif part is Part.ARGUMENTS and text:
            self._arguments.append(text)
            return [CallDelta(self.count - 1, text)] if self._announced else []
        elif part is Part.END:
            return self._close(True)
        return []

    def finish(self, cut: bool) -> list[CallDelta]:
        """The last pieces, when the stream has ended. cut: something other than the model ended it, so a header may lack its end."""
        if not self._open:
            return []
        whole = _is_object("".join(self._arguments)) if self._in_body else not cut
        deltas = self._close(whole)
        self.complete = whole
        return deltas

    def _announce(self, name: str) -> CallDelta:
        self._announced = True
        self.count += 1
        return CallDelta(self.count - 1, "", f"{PREFIX}{name}:{self._first + self.count - 1}", name)

    def _close(self, whole: bool) -> list[CallDelta]:
        """Ends the open call. Without a name it gets the likeliest one; arguments that are empty become {}."""
        if not self._open:
            return []
        self._open = False
        header, arguments = "".join(self._header), "".join(self._arguments)
        deltas: list[CallDelta] = []
        if not self._announced:
            name = resolve(header, self._functions) or _infer(arguments, self._functions) or _bare(header)
            known = name in self._functions
            if not name or not (known or arguments.strip()) or not (whole or self._in_body):
                return []  # an empty call, or the beginning of a name
            deltas.append(self._announce(name))
            if arguments:
                deltas.append(CallDelta(self.count - 1, arguments))
        if whole and not arguments.strip():
            deltas.append(CallDelta(self.count - 1, "{}"))
        return deltas


def resolve(header: str, functions: Mapping[str, frozenset[str]]) -> str | None:
    """The function that a header names, or None where it names none: functions.NAME:IDX, NAME:IDX, functions.NAME or NAME.

    A declared name wins over any reading of its dots; one that is not declared counts with an index only.
    """
    text = "".join(header.split())
    without_index = _INDEX.sub("", text)
    for name in (text, without_index, text.removeprefix(PREFIX), without_index.removeprefix(PREFIX)):
        if name in functions:
            return name
    name = without_index.removeprefix(PREFIX)
    return name if without_index != text and name and not name.isdecimal() else None


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Names of declared functions and of their parameters, out of OpenAI tool declarations."""
    found: dict[str, frozenset[str]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[function["name"]] = frozenset(properties) if isinstance(properties, Mapping) else frozenset()
    return found


def next_call_index(messages: Sequence[Mapping[str, Any]]) -> int:
    """The index of the next call of a conversation: above those of all canonical ids, and at least their number."""
    following = 0
    for message in messages:
        calls = message.get("tool_calls") if message.get("role") == "assistant" else None
        for call in calls if isinstance(calls, (list, tuple)) else ():
            following = max(following + 1, index_of(call.get("id")) + 1 if isinstance(call, Mapping) else 0)
    return following


def index_of(call_id: Any) -> int:
    """The index in a canonical id functions.NAME:IDX, else -1."""
    match = CALL_ID.fullmatch(call_id) if isinstance(call_id, str) else None
    return int(match["index"]) if match else -1


def _bare(header: str) -> str:
    return _INDEX.sub("", "".join(header.split())).removeprefix(PREFIX)


def _infer(arguments: str, functions: Mapping[str, frozenset[str]]) -> str | None:
    """The function whose parameters share most keys with the arguments; the first of equals."""
    if len(functions) == 1:
        return next(iter(functions))
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    shared = {name: len(parameters & value.keys()) for name, parameters in functions.items()}
    best = max(shared, key=shared.__getitem__, default=None)
    return best if best is not None and shared[best] else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
