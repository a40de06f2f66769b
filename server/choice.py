"""One choice of a chat answer: emissions to the deltas of the wire, and deltas to the whole message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from model.tool_parser import CallDelta, Markers, OutputMachine, Part, ToolCalls
from runtime.types import Emission, SamplingParams
from server.logprobs import chat_logprobs
from server.split import OutputCut

if TYPE_CHECKING:
    from runtime.api import Loaded

CUT_OFF = "incomplete_tool_call"  # stop_reason of an answer whose last call the model left without whole arguments

Delta = dict[str, Any]


class ChatChoice:
    """State of one choice. Deltas hold no null; a call's first is its slot, with id, name and empty arguments.

    calls: None where the request has no tools to call; markers are then content.
    """

    def __init__(self, params: SamplingParams, loaded: Loaded, in_reasoning: bool, calls: ToolCalls | None = None) -> None:
        self._tokenizer = tokenizer = loaded.tokenizer
        self._logprobs = params.logprobs
        self._calls = calls
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        markers = Markers.of(tokenizer.special)
        thinks = markers.think_end is not None
        self._cut: OutputCut | None = None
        if thinks or calls is not None:
            skip = params.skip_special_tokens
            shown = {token: len(tokenizer.decode([token], skip)) for token in markers.ids()}
            self._cut = OutputCut(OutputMachine(markers, in_reasoning and thinks, calls is not None), tokenizer.stream(skip), shown)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._cut is None else self._cut.machine.reasoning_tokens

    @property
    def in_reasoning(self) -> bool:
        return self._cut is not None and self._cut.machine.state is Part.REASONING

    def push(self, emission: Emission) -> tuple[list[Delta], dict[str, Any] | None]:
        """The deltas of one emission, and its log-probabilities. After the last one finish and stop_reason are set."""
        pieces = [(Part.CONTENT, emission.text)] if self._cut is None else self._cut.push(emission.tokens, emission.text)
        said: Delta = {}
        calls: list[CallDelta] = []
        for part, text in pieces:
            name = {Part.REASONING: "reasoning_content", Part.CONTENT: "content"}.get(part)
            if name is not None and text:
                said[name] = said.get(name, "") + text
            elif name is None and self._calls is not None:
                calls += self._calls.push(part, text)
        if emission.finish is not None:
            calls += self._end(emission)
        deltas = ([said] if said else []) + [{"tool_calls": [call_delta(call)]} for call in calls]
        logprobs = None
        if self._logprobs is not None and emission.logprobs:
            logprobs = chat_logprobs(self._tokenizer, emission.logprobs, self._logprobs)
        return deltas, logprobs

    def _end(self, emission: Emission) -> list[CallDelta]:
        """Calls that are whole make the finish "tool_calls", also where max_tokens took the section's end."""
        self.finish, self.stop_reason = emission.finish, emission.stop_reason
        if self._calls is None:
            return []
        calls = self._calls
        last = calls.finish(cut=emission.finish != "stop" or emission.stop_reason is not None)
        if calls.count and emission.finish in ("stop", "length"):
            if calls.complete:
                self.finish = "tool_calls"
            elif emission.finish == "stop" and emission.stop_reason is None:
                self.stop_reason = CUT_OFF
        return last


def call_delta(call: CallDelta) -> dict[str, Any]:
    """One piece of a call in OpenAI's streaming form."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_of(deltas: Iterable[Delta], in_reasoning: bool = False) -> dict[str, Any]:
    """The message that a list of deltas adds up to, so that streamed and whole answers can not differ.

    content is null where the answer proper never began, and beside calls where there is no text.
    """
    texts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        for name, parts in texts.items():
            if name in delta:
                parts.append(delta[name])
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({"id": piece["id"], "type": "function", "function": {"name": piece["function"]["name"], "arguments": ""}})
                arguments.append([])
            arguments[piece["index"]].append(piece["function"]["arguments"])
    content: str | None = "".join(texts["content"])
    message: dict[str, Any] = {"role": "assistant", "content": None if not content and (in_reasoning or calls) else content}
    if any(texts["reasoning_content"]):
        message["reasoning_content"] = "".join(texts["reasoning_content"])
    if calls:
        for call, parts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(parts)
        message["tool_calls"] = calls
    return message
