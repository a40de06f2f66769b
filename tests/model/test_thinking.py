"""The bound on the reasoning: at every node of a tree, around a grammar, and the same text with and without drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.grammar import GrammarCompiler
from model.thinking import UNBEGUN, ThinkingBudget, ThinkingState
from model.tiny import make_tiny
from model.tokenizer import Tokenizer
from model.tool_parser import Markers, OutputMachine, Part
from runtime.constraint import StructuredOutputs
from runtime.speculate import NoSpeculation
from runtime.types import DraftTree, InvalidRequest, Request, SamplingParams
from tests.worlds import BudgetByRequest, World, load_world, run

T = Tokenizer.load(Path(__file__).parents[2] / "model" / "demo")
MARKERS = Markers.of(T.special)
THINK, END, SECTION = T.special["<think>"], T.special["</think>"], T.special["<|tool_calls_section_begin|>"]
COMPILER = GrammarCompiler(T, T.vocab_size)


def tree_of(token: list[int], parent: list[int]) -> DraftTree:
    depth = [0]
    for above in parent[1:]:
        depth.append(depth[above] + 1)
    return DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))


def forced(state: ThinkingState, tree: DraftTree) -> set[int]:
    """Nodes after which only </think> may follow."""
    nodes, masks = state.masks(tree)
    ones = [np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() for mask in masks]
    return {node for node, allowed in zip(nodes.tolist(), ones, strict=True) if allowed == [END]}


def test_each_node_counts_its_own_path() -> None:
    """Root; 5, 6, 7 in a chain; </think> beside 6 with text after it; a section beside 7."""
    tree = tree_of([9, 5, 6, 7, END, 8, SECTION, 8], [-1, 0, 1, 2, 1, 4, 2, 6])
    state = ThinkingBudget(4, MARKERS, T.vocab_size, True).start()
    state.push([1, 2])
    assert forced(state, tree) == {2, 3}, "two committed and two of the path make four; what left the reasoning is free"
    assert state.prune(tree).token.tolist() == [9, 5, 6, END, 8], "after node 2 only </think> may follow: neither 7 nor a section"
    state.push([3])
    assert forced(state, tree) == {1, 2, 3}
    assert state.prune(tree).token.tolist() == [9, 5, END, 8]
    state.push([END, 5, 5, 5, THINK])
    assert forced(state, tree) == set(), "it opens once"


@pytest.mark.parametrize(("first", "open_"), [(THINK, True), (5, False)])
def test_a_model_that_opens_its_reasoning_itself(first: int, open_: bool) -> None:
    state = ThinkingBudget(1, MARKERS, T.vocab_size, False).start()
    assert forced(state, DraftTree.root_only(0)) == set()
    state.push([first])
    assert forced(state, DraftTree.root_only(0)) == set()
    state.push([5])
    assert (forced(state, DraftTree.root_only(0)) == {0}) is open_


def test_a_grammar_goes_on_behind_it() -> None:
    inner = COMPILER.compile(StructuredOutputs(choice=["ja"]), in_reasoning=True)
    state = ThinkingBudget(2, MARKERS, T.vocab_size, True, inner).start()
    tree = tree_of([9, 5, 6], [-1, 0, 1])
    nodes, _ = state.masks(tree)
    assert nodes.tolist() == [0, 1, 2], "the grammar forbids ends everywhere in the reasoning"
    assert forced(state, tree) == {2}
    state.push([5, 6, END])
    state.push(T.encode("ja"))
    nodes, masks = state.masks(DraftTree.root_only(0))
    assert np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist() == sorted(T.eos_ids)
    state.push([5])
    assert state.error is not None, "the grammar's error is the state's"
    mine = ThinkingBudget(2, MARKERS, T.vocab_size, True).start()
    mine.error = "x"
    assert mine.error == "x"


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_it_counts_what_the_parser_takes_for_reasoning(calls: bool, in_reasoning: bool) -> None:
    """Whatever is drawn: as long as the parser is in the reasoning it counts, and never less than the parser does."""
    rng, bound = np.random.default_rng(5), ThinkingBudget(9, MARKERS, T.vocab_size, in_reasoning, calls=calls)
    special, inside = sorted(MARKERS.ids()), 0
    for _ in range(2000):
        machine, used = OutputMachine(MARKERS, in_reasoning, calls), 0 if in_reasoning else UNBEGUN
        for _ in range(rng.integers(1, 12)):
            token = int(rng.choice(special)) if rng.random() < 0.3 else 5
            machine.step(token)
            used = bound.after(used, token)
            if machine.state is Part.REASONING:
                assert used >= machine.reasoning_tokens, "a bound that stopped counting would never end it"
                inside += 1
    assert inside > 200


def test_what_can_not_be_bounded_is_named() -> None:
    for tokens, markers, said in ((-1, MARKERS, "below 0"), (3, Markers(), "no reasoning")):
        with pytest.raises(InvalidRequest, match=said) as refused:
            ThinkingBudget(tokens, markers, T.vocab_size, True)
        assert refused.value.field == "thinking_token_budget"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return load_world(make_tiny(tmp_path_factory.mktemp("tiny")), max_model_len=256, num_pages=1000)


def test_drafts_change_nothing(world: World) -> None:
    """A random model would think for ever: every text leaves its reasoning after exactly so many tokens."""
    tokenizer, vocab = world.tokenizer, world.executor.limits.vocab_size
    markers, end = Markers.of(tokenizer.special), tokenizer.special["</think>"]
    assert end is not None
    requests = []
    for i in range(24):
        prompt = [*tokenizer.encode(f"so {i}"), tokenizer.special["<think>"]]
        params = SamplingParams(max_tokens=40, temperature=(0.0, 1.2)[i % 2], ignore_eos=True, logit_bias={end: -100.0})
        constraint = ThinkingBudget(i, markers, vocab, True)
        requests.append(Request(str(i), np.array(prompt, np.int32), params, 50 + i, constraint=constraint))
    plain = run(world.engine(NoSpeculation()), requests)
    for i in range(24):
        tokens = list(plain[str(i)].tokens)
        leaves = [at for at, token in enumerate(tokens) if token in (end, markers.section_begin)]
        assert leaves and leaves[0] <= i, (i, tokens)
    assert sum(list(plain[str(i)].tokens).index(end) == i for i in range(24) if end in plain[str(i)].tokens) > 15
    drafted = run(world.engine(BudgetByRequest(world.executor)), requests)
    assert [id for id in plain if plain[id].tokens != drafted[id].tokens] == []
    assert sum(one.accepted for one in drafted.values()) > 0
