"""Traces and what is made of them, against slow walks over the same arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.accept import accept
from runtime.tree import grow
from runtime.types import DraftLogits
from tools.replay import Grown, States, excerpt, grow_states, load_states

TRACES = Path(__file__).parents[1] / "fixtures" / "draft_traces.npz"
NODES = 24


@pytest.fixture(scope="module")
def states() -> States:
    return load_states(TRACES)


@pytest.fixture(scope="module")
def grown(states: States) -> Grown:
    return grow_states(states, NODES)


def test_states_hold_the_texts_in_order(states: States) -> None:
    with np.load(TRACES) as held:
        tokens, start, end = held["chat.tokens"][0], int(held["chat.prompt_length"][0]), int(held["chat.end"][0])
        ids = held["chat.ids"][0]
    count = min(end - start - 1, len(ids))
    assert states.last[0] == count and states.last[count] > count
    assert states.truth[0].tolist() == tokens[start + 1 : start + 8].tolist()
    assert states.truth[count - 1, 0] == tokens[start + count]
    np.testing.assert_array_equal(states.logits.ids[:count], ids[:count])
    right = (states.logits.ids[:, 0, 0] == states.truth[:, 0]).mean()
    shifted = (states.logits.ids[:-1, 0, 0] == states.truth[1:, 0]).mean()
    assert right > 0.7 > 0.2 > shifted, "mutation: truth one position off"


def test_a_stream_stops_at_its_texts_end(states: States) -> None:
    last = int(states.last[0])
    at = np.array([0, last - 1, len(states) - 1])
    assert states.moves(at, np.array([3, 5, 2])).tolist() == [3, 1, 1]


@pytest.mark.parametrize("budget", [0, 1, 5, NODES])
def test_accepted_nodes_are_those_of_the_engines_walk(states: States, grown: Grown, budget: int) -> None:
    """The target says the text's next token at every node of the right path and something else elsewhere."""
    some = np.arange(0, len(states), 37)
    trees = grow(DraftLogits(states.logits.ids[some], states.logits.logp[some]), np.zeros(len(some), np.int32), budget)
    for state, tree, count in zip(some, trees, grown.accepted(some, budget).tolist(), strict=True):
        truth = states.truth[state].tolist() + [-1]
        target = np.array([truth[d] if d < len(truth) else -1 for d in tree.depth.tolist()], np.int32)
        # off the path a target equals the truth of that depth too, but no walk comes there
        assert len(accept(tree, target).path) - 1 == count
    kept = np.zeros((len(some), NODES), bool)
    kept[:, :budget] = True
    assert (grown.accepted_of(some, kept) == grown.accepted(some, budget)).all()


def test_more_nodes_accept_more_and_never_more_than_the_path(grown: Grown) -> None:
    every = np.arange(len(grown.exists))
    counts = np.stack([grown.accepted(every, n) for n in range(NODES + 1)])
    assert (np.diff(counts, axis=0) >= 0).all() and (counts[-1] == grown.longest()).all()
    assert (grown.on_path.sum(axis=1) == grown.longest()).all()
    assert counts[8].mean() > grown.chain.mean() > 1.0


def test_excerpts_are_trace_files(tmp_path: Path, states: States) -> None:
    excerpt(TRACES, tmp_path / "e.npz", texts=2, positions=10)
    small = load_states(tmp_path / "e.npz")
    assert len(small) == 4 * 10
    np.testing.assert_array_equal(small.truth[:10], states.truth[:10])


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"chat.ids": np.zeros(1)})
    with pytest.raises(ValueError, match=r"chat\.logp, chat\.tokens.*record_traces"):
        load_states(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="no state"):
        load_states(TRACES, slice(0, 0))
