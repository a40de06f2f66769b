from __future__ import annotations

import numpy as np
import pytest

from runtime.accept import accept
from runtime.tree import check_tree, random_tree
from runtime.types import DraftTree


def make(token: list[int], parent: list[int]) -> DraftTree:
    depth = [0]
    for above in parent[1:]:
        depth.append(depth[above] + 1)
    return DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))


def walk(tree: DraftTree, target: np.ndarray) -> list[int]:
    """The path by definition, with a table of children."""
    children = {(int(p), int(x)): t for t, (p, x) in reversed(list(enumerate(zip(tree.parent, tree.token, strict=True)))) if t}
    path = [0]
    while (path[-1], int(target[path[-1]])) in children:
        path.append(children[path[-1], int(target[path[-1]])])
    return path


def draw_targets(rng: np.random.Generator, tree: DraftTree, vocab: int, agree: float) -> np.ndarray:
    target = rng.integers(0, vocab, len(tree)).astype(np.int32)
    for t in range(len(tree) - 1, 0, -1):
        if rng.random() < agree:
            target[tree.parent[t]] = tree.token[t]
    return target


@pytest.mark.parametrize("agree", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("vocab", [2, 30])
def test_accept_is_the_walk(agree: float, vocab: int) -> None:
    rng = np.random.default_rng([int(agree * 10), vocab])
    lengths = set()
    for _ in range(150):
        tree = random_tree(rng, int(rng.integers(vocab)), vocab, int(rng.integers(0, 30)), 7)
        target = draw_targets(rng, tree, vocab, agree)
        found = accept(tree, target)
        path = walk(tree, target)
        assert found.path.tolist() == path
        assert found.tokens.tolist() == target[path].tolist()
        assert found.tokens[:-1].tolist() == tree.token[path[1:]].tolist()
        assert found.moves.tolist() == [[node, place] for place, node in enumerate(path) if node != place]
        assert found.path.dtype == found.tokens.dtype == found.moves.dtype == np.int32
        lengths.add(len(path))
    assert len(lengths) > 2 or agree == 0.0


def test_token_zero_is_a_token() -> None:
    found = accept(make([0, 0, 0, 5], [-1, 0, 1, 1]), np.array([0, 0, 0, 0], np.int32))
    assert found.path.tolist() == [0, 1, 2]
    assert found.tokens.tolist() == [0, 0, 0]


def test_a_path_that_is_no_prefix_moves_its_nodes() -> None:
    tree = make([9, 1, 2, 3, 4, 5], [-1, 0, 0, 2, 2, 4])
    found = accept(tree, np.array([2, 0, 4, 0, 5, 7], np.int32))
    assert found.path.tolist() == [0, 2, 4, 5]
    assert found.tokens.tolist() == [2, 4, 5, 7]
    assert found.moves.tolist() == [[2, 1], [4, 2], [5, 3]]
    first_nodes = list(range(len(found.path)))  # the fault: as if what is accepted came first
    assert found.path.tolist() != first_nodes


def test_the_likeliest_chain_moves_nothing() -> None:
    found = accept(make([9, 1, 2, 3], [-1, 0, 1, 2]), np.array([1, 2, 3, 4], np.int32))
    assert found.path.tolist() == [0, 1, 2, 3]
    assert found.moves.shape == (0, 2)
    assert found.tokens.tolist() == [1, 2, 3, 4]


def test_nothing_accepted_gives_the_bonus_alone() -> None:
    for tree in (make([9], [-1]), make([9, 1, 2], [-1, 0, 0])):
        found = accept(tree, np.full(len(tree), 7, np.int32))
        assert (found.path.tolist(), found.tokens.tolist(), found.moves.tolist()) == ([0], [7], [])


def test_a_child_counts_under_its_own_parent_alone() -> None:
    # Node 3 carries the token drawn at node 1 but hangs under node 2: a chain-like scan would take it.
    found = accept(make([9, 1, 2, 3], [-1, 0, 0, 2]), np.array([1, 3, 3, 3], np.int32))
    assert found.path.tolist() == [0, 1]
    assert found.tokens.tolist() == [1, 3]


def test_draws_off_the_path_do_not_matter_and_on_it_do() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        tree = random_tree(rng, 0, 6, 20, 5)
        target = draw_targets(rng, tree, 6, 0.7)
        found = accept(tree, target)
        other = rng.integers(0, 6, len(tree)).astype(np.int32)
        other[found.path] = target[found.path]
        assert accept(tree, other).tokens.tolist() == found.tokens.tolist()
        other[found.path[-1]] += 1
        assert accept(tree, other).tokens.tolist() != found.tokens.tolist()


def test_moves_in_rising_order_may_be_done_in_place() -> None:
    rng = np.random.default_rng(8)
    moved = 0
    for _ in range(100):
        tree = random_tree(rng, 0, 9, 25, 7)
        found = accept(tree, draw_targets(rng, tree, 9, 0.9))
        slots = np.arange(len(tree))
        for node, place in found.moves:
            assert node > place
            slots[place] = slots[node]
        assert slots[: len(found.path)].tolist() == found.path.tolist()
        moved += len(found.moves)
    assert moved > 50


def test_of_twins_the_first_wins() -> None:
    twins = make([9, 4, 4, 5], [-1, 0, 0, 1])
    with pytest.raises(ValueError, match="both token 4"):
        check_tree(twins)
    assert accept(twins, np.array([4, 5, 5, 5], np.int32)).path.tolist() == [0, 1, 3]


def test_one_draw_a_node() -> None:
    tree = make([9, 1, 2], [-1, 0, 1])
    for count in (1, 2, 4):  # a draw a branch, or a tree other than the one whose rows were verified
        with pytest.raises(ValueError, match=f"{count} target tokens for a tree of 3 nodes"):
            accept(tree, np.ones(count, np.int32))
