"""The sweep over all trees against the walk down one, and rows that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.accept import accept
from runtime.grove import Grove
from runtime.tree import random_tree
from runtime.types import DraftTree
from runtime.verdicts import judge

VOCAB = 3  # so small that random draws agree with random nodes


def some_trees(rng: np.random.Generator, count: int) -> tuple[list[DraftTree], np.ndarray]:
    trees = [random_tree(rng, int(rng.integers(VOCAB)), VOCAB, int(rng.integers(0, 40)), 9) for _ in range(count)]
    return trees, rng.integers(0, VOCAB, sum(map(len, trees))).astype(np.int32)


def differences(rng: np.random.Generator, rounds: int) -> int:
    wrong = 0
    for _ in range(rounds):
        trees, target = some_trees(rng, int(rng.integers(1, 9)))
        got = judge(trees, target, np.ones(len(target), np.bool_))
        at = 0
        for tree, verdict in zip(trees, got, strict=True):
            want = accept(tree, target[at : at + len(tree)])
            wrong += (verdict.path, verdict.tokens, verdict.first_out) != (want.path.tolist(), want.tokens.tolist(), at)
            wrong += verdict.corrupted
            at += len(tree)
    return wrong


@pytest.mark.parametrize("single", [True, False])
def test_sweep_equals_walk(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    """All trees at once, and node by node, as where one has twins."""
    monkeypatch.setattr(Grove, "single", single)
    assert differences(rng, 100) == 0


def test_mutation_children_of_any_parent_are_noticed(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is on the path if the target drew its token at its parent, not at a sibling of the parent: by table, and all at once."""
    children, leaps = Grove.children.func, Grove.leaps.func  # type: ignore[attr-defined]
    astray = property(lambda grove: {(max(above - 1, 0), token): node for (above, token), node in children(grove).items()})
    higher = property(lambda grove: [np.maximum(leap - 1, 0) for leap in leaps(grove)])
    assert differences(rng, 20) == 0
    for name, wrong, single in (("children", astray, False), ("leaps", higher, True)):
        with monkeypatch.context() as patch:
            patch.setattr(Grove, "single", single)
            patch.setattr(Grove, name, wrong)
            assert differences(rng, 20) > 0


def test_twins_are_judged_as_the_walk_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = DraftTree(np.array([5, 7, 7, 8], np.int32), np.array([-1, 0, 0, 2], np.int16), np.array([0, 1, 1, 2], np.int16))
    other = DraftTree.root_only(4)
    target = np.array([7, 8, 8, 9, 6], np.int32)
    first, second = judge([tree, other], target, np.ones(5, np.bool_))
    assert first.path == accept(tree, target[:4]).path.tolist() == [0, 1]
    assert second.path == [0] and second.tokens == [6]
    assert not Grove.of([tree, other]).single and Grove.of([DraftTree(np.array([5, 7, 6, 8], np.int32), tree.parent, tree.depth)]).single
    monkeypatch.setattr(Grove, "single", True)  # mutation: a draw leads to both
    assert judge([tree, other], target, np.ones(5, np.bool_))[0].path != [0, 1]


@pytest.mark.parametrize("bad", range(5))
def test_path_ends_before_the_first_unsound_row(bad: int) -> None:
    """Nodes 0, 1, 3 are the path; 2 is a sibling of 1, so its row is nobody's business."""
    tree = DraftTree(np.array([5, 6, 7, 8], np.int32), np.array([-1, 0, 0, 1], np.int16), np.array([0, 1, 1, 2], np.int16))
    target = np.array([6, 8, 0, 9, 3], np.int32)
    sound = np.ones(5, np.bool_)
    sound[bad] = False
    first, second = judge([tree, DraftTree.root_only(1)], target, sound)
    want = {0: [], 1: [0], 3: [0, 1]}.get(bad, [0, 1, 3])
    assert first.path == want and first.tokens == [6, 8, 9][: len(want)]
    assert first.corrupted is (bad in (0, 1, 3))
    assert second.corrupted is (bad == 4) and second.tokens == ([] if bad == 4 else [3])
