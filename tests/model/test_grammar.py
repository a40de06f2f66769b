"""Grammars as token masks: along trees, after the reasoning, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.grammar import GrammarCompiler, GrammarState
from model.tokenizer import Tokenizer
from model.tool_grammar import calls_grammar, check_parameters
from model.tool_parser import Markers
from runtime.constraint import StructuredOutputs
from runtime.types import DraftTree, InvalidRequest

T = Tokenizer.load(Path(__file__).parents[2] / "model" / "demo")
COMPILER = GrammarCompiler(T, T.vocab_size)
MARKERS = Markers.of(T.special)
THINK_END, SECTION = T.special["</think>"], T.special["<|tool_calls_section_begin|>"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def after(outputs: StructuredOutputs, tokens: list[int], in_reasoning: bool = False) -> tuple[GrammarState, set[int] | None]:
    """What may follow tokens, asked of a fresh state that took them one by one; None if anything may."""
    state = COMPILER.compile(outputs, in_reasoning).start()
    for token in tokens:
        state.push([token])
    nodes, masks = state.masks(DraftTree.root_only(0))
    return state, allowed(masks[0]) if len(nodes) else None


def paths_of(tree: DraftTree) -> list[list[int]]:
    """Tokens below the root down to each node."""
    paths: list[list[int]] = [[]]
    for token, parent, depth in list(zip(tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist(), strict=True))[1:]:
        paths.append([*paths[parent], token])
        assert len(paths[-1]) == depth
    return paths


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_each_node_is_held_to_its_own_path(in_reasoning: bool) -> None:
    """A random tree around a right answer: every mask is what a state gives that took that node's path alone."""
    rng = np.random.default_rng(3)
    outputs = StructuredOutputs(json=SCHEMA)
    before = [*T.encode("so"), THINK_END] if in_reasoning else []
    truth = [*before, *T.encode('{"a": 12, "b": "x y"}'), T.special["<|im_end|>"], 5]
    for taken in range(len(truth)):
        state = COMPILER.compile(outputs, in_reasoning).start()
        state.push(truth[:taken])
        token, parent, depth, path = [0], [-1], [0], [list[int]()]
        for _ in range(20):
            above = int(rng.integers(max(0, len(token) - 5), len(token)))
            right = truth[taken:][: depth[above] + 1]
            new = right[-1] if len(right) > depth[above] and rng.random() < 0.7 else int(rng.integers(T.vocab_size))
            token.append(new)
            parent.append(above)
            depth.append(depth[above] + 1)
            path.append([*path[above], new])
        tree = DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))
        for _ in range(2):  # the walk leaves no trace
            nodes, masks = state.masks(tree)
            found = dict(zip(nodes.tolist(), map(allowed, masks), strict=True))
            assert sorted(found) == nodes.tolist() and (0 in found or taken >= len(truth) - 1)
            fine = []
            for node in range(21):
                lone, want = after(outputs, truth[:taken] + path[node], in_reasoning)
                if lone.error is not None:
                    assert node not in found, "forbidden nodes have no mask"
                else:
                    assert found.get(node) == want, (taken, node)
                    fine.append(path[node])
            assert paths_of(state.prune(tree)) == fine


def test_the_grammar_waits_for_the_end_of_the_reasoning() -> None:
    outputs = StructuredOutputs(json=SCHEMA)
    free = after(outputs, T.encode("{[ anything"), True)[1]
    assert free is not None and set(range(T.vocab_size)) - free == (T.eos_ids | MARKERS.ids()) - {THINK_END}
    begun = after(outputs, [*T.encode("x"), THINK_END], True)[1]
    assert begun == after(outputs, [])[1] and begun != free
    assert after(outputs, [*T.encode("x"), SECTION], True)[0].error is not None


def test_after_the_end_nothing_is_constrained() -> None:
    outputs = StructuredOutputs(choice=["yes", "no"])
    assert after(outputs, T.encode("yes"))[1] == T.eos_ids
    for end in T.eos_ids:
        assert after(outputs, [*T.encode("yes"), end])[1] is None
    assert after(outputs, [*T.encode("ye"), next(iter(T.eos_ids))])[0].error is not None


def test_forced_calls() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    many = calls_grammar({"a.b": schema, "c": None}, MARKERS, True)
    call = [T.special["<|tool_call_begin|>"], *T.encode("functions.a.b:0"), T.special["<|tool_call_argument_begin|>"]]
    one = [*call, *T.encode('{"x": 3}'), T.special["<|tool_call_end|>"]]
    end = T.special["<|tool_calls_section_end|>"]
    assert after(many, [])[1] == {SECTION}
    assert after(many, [SECTION, *one])[1] == {end, call[0]}
    assert after(many, [SECTION, *one, *one, end])[1] == T.eos_ids
    assert after(calls_grammar({"a.b": schema}, MARKERS, False), [SECTION, *one])[1] == {end}
    assert after(many, [SECTION, *call, *T.encode('{"y"')])[0].error is not None
    reasoned = after(many, [*T.encode("hm"), SECTION], True)
    assert reasoned[1] == {call[0]}, "a section may end the reasoning"
    with pytest.raises(InvalidRequest, match="no tool calls"):
        calls_grammar({"a": None}, Markers(), True)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[tuple[str, Any]] = [
    ("json", {"type": 7}),
    ("json", {"type": "strin"}),
    ("json", {"type": "string", "pattern": "["}),
    ("json", {"$ref": "#/$defs/none"}),
    ("json", {"$ref": "http://example.com/schema"}),
    ("json", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("json", deep(100)),
    ("json", [1]),
    ("json", "{"),
    ("json", {"enum": ["x" * (1 << 18)]}),
    ("json", {"type": "string", "minLength": 5, "maxLength": 2}),
    ("json", "true"),
    ("regex", "["),
    ("regex", "(a{1000}){1000}"),
    ("regex", "a" * 20_000),
    ("regex", ""),
    ("choice", []),
    ("choice", "ab"),
    ("choice", [1]),
    ("choice", ["a"] * 2000),
    ("grammar", "start: ("),
    ("grammar", "root ::= ("),
    ("grammar", "start: missing"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:40])
def test_bad_ones_are_refused_in_time(name: str, value: Any) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(StructuredOutputs(**{name: value}))
    assert caught.value.field == f"structured_outputs.{name}" and len(str(caught.value)) < 400
    assert time.process_time() - start < 5


@pytest.mark.parametrize("outputs", [StructuredOutputs(), StructuredOutputs(json={}, regex="a"), StructuredOutputs(json_object=False)])
def test_exactly_one_is_needed(outputs: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        COMPILER.compile(outputs)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (StructuredOutputs(json_object=True), '{"x": [1, {}]}'),
        (StructuredOutputs(json={}), "[1]"),
        (StructuredOutputs(json='{"type": "integer"}'), "12"),
        (StructuredOutputs(regex=r"\d{3}-[a-z]+"), "123-x"),
        (StructuredOutputs(choice=['a "b"', "é\n"]), "é\n"),
        (StructuredOutputs(grammar='start: "x" | "y" start'), "yyx"),
        (StructuredOutputs(grammar='root ::= "x" | "y" root'), "yyx"),
    ],
    ids=str,
)
def test_every_form_is_read(outputs: StructuredOutputs, text: str) -> None:
    assert after(outputs, T.encode(text))[1] & T.eos_ids == T.eos_ids  # type: ignore[operator]
    assert after(outputs, T.encode("?"))[0].error is not None


def test_the_cache_is_bounded_and_hit() -> None:
    compiler = GrammarCompiler(T, T.vocab_size)
    for i in range(compiler.KEPT + 20):
        compiler.compile(StructuredOutputs(regex=f"a{{{i}}}b"))
    assert len(compiler._kept) == compiler.KEPT
    before = compiler.compile(StructuredOutputs(json=SCHEMA))
    assert compiler.compile(StructuredOutputs(json=SCHEMA))._matcher is before._matcher
    assert compiler.compile(StructuredOutputs(json=SCHEMA), True)._matcher is before._matcher


def test_calls_that_need_not_be_made() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    outputs = calls_grammar({"a": schema}, MARKERS, False)
    state = COMPILER.compile(outputs, True, optional=True).start()
    state.push([*T.encode("thought"), THINK_END, *T.encode("text")])
    free = allowed(state.masks(DraftTree.root_only(0))[1][0])
    assert {SECTION, THINK_END, *T.eos_ids} <= free and T.special["<|tool_call_begin|>"] not in free
    state.push([SECTION])
    assert allowed(state.masks(DraftTree.root_only(0))[1][0]) == {T.special["<|tool_call_begin|>"]}
    assert state.error is None


def test_an_answer_or_calls() -> None:
    either = calls_grammar({"a": None}, MARKERS, True, SCHEMA)
    first = after(either, [])[1]
    assert first is not None and {SECTION, *T.encode("{")} <= first and not first & set(T.encode("x"))
    assert after(either, T.encode('{"a": 1, "b": ""}'))[1] >= T.eos_ids  # type: ignore[operator]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 7},
        {"type": ["string", 3]},
        {"properties": {"a": {"items": [{"pattern": "["}]}}},
        {"pattern": "a" * 5000},
        {"anyOf": [{"$ref": "#/$defs/none"}]},
        {"$ref": "http://example.com"},
        {"properties": {"a": 3}},
        deep(100),
        [],
        "x",
    ],
    ids=lambda v: str(v)[:40],
)
def test_declarations_that_mean_nothing(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        check_parameters(schema, "tools[0].function.parameters")


def test_declarations_that_are_merely_unusual_pass() -> None:
    for schema in (
        None,
        True,
        {},
        {"type": "any", "x-own": [1]},
        {"properties": {"type": {"type": "string"}, "$ref": {"type": "string"}, "pattern": {}}},
        {"properties": {"p": {"pattern": r"^(?=a)\w+$"}, "q": {"pattern": r"\p{L}+"}}},
        {"$defs": {"a/b": {"items": [{"type": "null"}]}}, "anyOf": [{"$ref": "#/$defs/a~1b/items/0"}, {"$ref": "#"}]},
        deep(20),
    ):
        check_parameters(schema, "tools[0].function.parameters")
