"""Tool calls out of token ids: what is a call, whose name it has, and that no grouping of tokens changes any of it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tool_parser import CallDelta, Markers, OutputMachine, Part, ToolCalls, functions_of, next_call_index, resolve

THINK, THINK_END, BEGIN, END, CALL, ARGS, CALL_END = range(1000, 1007)
MARKERS = Markers(THINK, THINK_END, BEGIN, END, CALL, ARGS, CALL_END)
NAMES = {
    "[think_end]": THINK_END,
    "[section]": BEGIN,
    "[/section]": END,
    "[call]": CALL,
    "[args]": ARGS,
    "[/call]": CALL_END,
}
FUNCTIONS = {"weather": frozenset({"city"}), "search": frozenset({"query", "limit"}), "a.b-c_d": frozenset[str]()}
Outcome = tuple[str, str, list[tuple[str, str, str]], bool]


def tokens_of(text: str) -> list[int]:
    """Characters as tokens, [name] as the marker."""
    out: list[int] = []
    while text:
        name = next((n for n in NAMES if text.startswith(n)), None)
        out.append(NAMES[name] if name else ord(text[0]))
        text = text[len(name or "x") :]
    return out


def assemble(deltas: Sequence[CallDelta]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of every call; the shape of the pieces is checked on the way."""
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(calls) and delta.name and delta.arguments == "", "the first piece is the slot"
            calls.append([delta.id, delta.name, ""])
        else:
            assert delta.index == len(calls) - 1 and delta.name is None and delta.arguments
            calls[-1][2] += delta.arguments
    return [(a, b, c) for a, b, c in calls]


def parse(tokens: Sequence[int], *, reasoning: bool = False, first: int = 0, cut: bool = False) -> Outcome:
    machine, calls = OutputMachine(MARKERS, reasoning, True), ToolCalls(FUNCTIONS, first)
    text: dict[Part, str] = {}
    deltas: list[CallDelta] = []
    for token in tokens:
        part, mark = machine.step(token)
        if mark is not None:
            deltas += calls.push(mark)
        shown = "<marker>" if token >= 1000 else chr(token)
        text[part] = text.get(part, "") + shown
        deltas += calls.push(part, shown)
    deltas += calls.finish(cut)
    made = assemble(deltas)
    assert calls.count == len(made)
    return text.get(Part.REASONING, ""), text.get(Part.CONTENT, ""), made, calls.complete


def calls(text: str, **options: bool) -> list[tuple[str, str, str]]:
    return parse(tokens_of(text), **options)[2]  # type: ignore[arg-type]


ONE = '[section][call]functions.weather:0[args]{"city": "X"}[/call][/section]'


def test_a_call() -> None:
    assert parse(tokens_of("Let me look." + ONE)) == ("", "Let me look.", [("functions.weather:0", "weather", '{"city": "X"}')], True)
    assert parse(tokens_of("hm[think_end]so" + ONE), reasoning=True)[:2] == ("hm", "so")
    assert parse(tokens_of("hm" + ONE), reasoning=True)[:2] == ("hm", ""), "a section ends the reasoning"
    assert parse(tokens_of(ONE), first=7)[2][0][0] == "functions.weather:7"


def test_two_calls_and_what_stands_between_them() -> None:
    text = "A[section] filler [call]functions.weather:0[args]{}[/call] more [call]functions.search:1[args]{}[/call]x[/section] after"
    assert parse(tokens_of(text)) == ("", "A", [("functions.weather:0", "weather", "{}"), ("functions.search:1", "search", "{}")], True)


@pytest.mark.parametrize(
    "header",
    [
        "functions.weather:0",
        "weather:0",
        "weather",
        "functions.weather",
        " functions.weather:12\n",
        "functions.weather : 0",
        "3",
        "call_a1b2",
    ],
)
def test_foreign_headers(header: str) -> None:
    text = f'[section][call]{header}[args]{{"city": "X"}}[/call][/section]'
    assert calls(text) == [("functions.weather:0", "weather", '{"city": "X"}')]


def test_names() -> None:
    assert resolve("functions.a.b-c_d:4", FUNCTIONS) == "a.b-c_d"
    assert resolve("functions.other.x-y_z:4", FUNCTIONS) == "other.x-y_z", "not declared, but named"
    assert resolve("functions.x:0", {"functions.x": frozenset()}) == "functions.x", "a declared name wins"
    assert resolve("a:1:0", {"a:1": frozenset()}) == "a:1"
    assert [resolve(h, FUNCTIONS) for h in ("3", ":3", "", "functions.:1", "call_9")] == [None] * 5
    assert functions_of([{"type": "function", "function": {"name": "f"}}, {"function": 3}]) == {"f": frozenset()}


def test_a_bare_counter_takes_the_function_whose_parameters_fit() -> None:
    assert calls('[section][call]3[args]{"limit": 3, "query": "x"}[/call]')[0][1] == "search"
    assert calls('[section][call]3[args]{"none": 3}[/call]')[0][1] == "3", "nothing fits: as it is"
    assert calls("[section][call]3[args]{broken[/call]")[0][1:] == ("3", "{broken")


@pytest.mark.parametrize(
    ("text", "arguments", "complete"),
    [
        ('[section][call]weather:0[args]{"city": "X"}', '{"city": "X"}', True),
        ('[section][call]weather:0[args]{"city": "X"}[/call]', '{"city": "X"}', True),
        ('[section][call]weather:0[args]{"city": "X', '{"city": "X', False),
        ('[section][call]weather:0[args]{"city": "X"}[/section]', '{"city": "X"}', True),
        ("[section][call]weather:0[args][/call]", "{}", True),
        ("[section][call]weather:0[/call]", "{}", True),
        ('[call]weather:0[args]{"city": "X"}', '{"city": "X"}', True),
        ("[section][call]weather:0[args]", "", False),
    ],
)
def test_missing_ends(text: str, arguments: str, complete: bool) -> None:
    for cut in (False, True):
        assert parse(tokens_of(text), cut=cut)[2:] == ([("functions.weather:0", "weather", arguments)], complete)


def test_a_header_without_its_end() -> None:
    assert parse(tokens_of("[section][call]weath"), cut=True)[2:] == ([], False)
    assert calls("[section][call]weather:0", cut=True) == []
    assert calls("[section][call]weather:0") == [("functions.weather:0", "weather", "{}")], "the model itself ended there"
    assert calls("[section][call][/call][/section]") == []


def test_a_call_that_begins_inside_another_ends_it() -> None:
    assert [a for _, _, a in calls('[section][call]weather:0[args]{"a": 1}[call]search:1[args]{"b": 2}[/call]')] == ['{"a": 1}', '{"b": 2}']


def test_twenty_kilobytes() -> None:
    arguments = json.dumps({"city": "x" * 20_000})
    assert calls(f"[section][call]weather:0[args]{arguments}[/call][/section]") == [("functions.weather:0", "weather", arguments)]


def test_spelled_markers_change_nothing() -> None:
    spelled = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0</think>"
    assert parse(tokens_of(spelled)) == ("", spelled, [], True)
    inside = f'[section][call]weather:0[args]{{"city": "{spelled}<|tool_call_end|>"}}[/call]'
    assert json.loads(calls(inside)[0][2])["city"] == spelled + "<|tool_call_end|>"


def test_a_model_that_opens_its_own_reasoning() -> None:
    for tools in (True, False):
        for tokens, wanted in (([THINK, 65, THINK_END, 66], "RC"), ([65, THINK, 66], "CCC"), ([THINK_END, 66], "C")):
            machine = OutputMachine(MARKERS, False, tools)
            parts = [part for part, _ in map(machine.step, tokens)]
            names = {Part.REASONING: "R", Part.CONTENT: "C", Part.DROPPED: ""}
            assert "".join(names[part] for part in parts) == wanted


def test_without_tools_markers_are_content() -> None:
    machine = OutputMachine(MARKERS, True, False)
    assert [machine.step(t)[0] for t in (65, BEGIN, CALL, 66)] == [Part.REASONING, Part.CONTENT, Part.CONTENT, Part.CONTENT]
    assert machine.reasoning_tokens == 1


def test_the_next_index() -> None:
    def said(*ids: str | None) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"id": i} for i in ids]}

    assert next_call_index([]) == 0
    assert next_call_index([said("functions.x:0", "functions.y:1")]) == 2
    assert next_call_index([said("functions.x:5"), said(None, "call_1")]) == 8
    assert next_call_index([{"role": "user", "content": "functions.x:9"}, said(), {"role": "user", "tool_calls": [{}]}]) == 0


PIECES = st.sampled_from([*NAMES, "functions.weather:0", "search:1", '{"city": "é"}', '{"q', "3", " ", "text", "\n"])


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=14), st.booleans(), st.booleans())
def test_any_sequence_is_parsed_and_leaks_no_marker(pieces: list[str], reasoning: bool, cut: bool) -> None:
    thought, content, made, _ = parse(tokens_of("".join(pieces)), reasoning=reasoning, cut=cut)
    assert "<marker>" not in thought + content
    assert all(i == f"functions.{name}:{n}" for n, (i, name, _) in enumerate(made))
    if "[call]" not in pieces:
        assert made == []
