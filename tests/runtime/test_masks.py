"""Masks of a step: whose they are, and that a forbidden token is never drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.kernels_np.sample import sample
from runtime.masks import apply_masks, fill_masks, prune, push
from runtime.types import DraftTree


class Fixed:
    """Constrains these nodes to these tokens."""

    def __init__(self, allowed: dict[int, list[int]], vocab: int) -> None:
        self.error: str | None = None
        self._allowed, self._vocab = allowed, vocab

    def masks(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        return np.array(sorted(self._allowed), np.int32), np.stack([bits(self._allowed[n], self._vocab) for n in sorted(self._allowed)])

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree

    def push(self, tokens: Sequence[int]) -> None: ...


def bits(tokens: Sequence[int], vocab: int) -> np.ndarray:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words


def test_rows_are_those_of_the_nodes() -> None:
    tree = DraftTree.root_only(0)
    rows, masks = fill_masks([(Fixed({0: [1], 3: [40]}, 70), 2, tree), (Fixed({1: [69]}, 70), 9, tree)])
    assert rows.tolist() == [2, 5, 10] and masks.shape == (3, 3) and masks.dtype == np.uint32
    assert [int(m) for m in masks[1]] == [0, 1 << 8, 0]
    rows, masks = fill_masks([])
    assert rows.shape == (0,) and len(masks) == 0


def test_a_state_that_raises_is_marked_and_the_others_stand() -> None:
    class Broken(Fixed):
        def masks(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
            raise RuntimeError("broken")

        def prune(self, tree: DraftTree) -> DraftTree:
            raise RuntimeError("broken")

    broken, good = Broken({}, 70), Fixed({0: [1]}, 70)
    for _ in range(2):
        rows, _ = fill_masks([(broken, 0, DraftTree.root_only(0)), (good, 4, DraftTree.root_only(0))])
        assert rows.tolist() == [4] and broken.error is not None and good.error is None


def test_pruning_fails_alone_too() -> None:
    class Broken(Fixed):
        def prune(self, tree: DraftTree) -> DraftTree:
            raise RuntimeError("broken")

    tree = DraftTree(np.array([1, 2], np.int32), np.array([-1, 0], np.int16), np.array([0, 1], np.int16))
    broken = Broken({}, 70)
    assert prune(broken, tree) is tree and broken.error is not None
    assert prune(None, tree) is tree


def test_a_panic_is_held_back_and_an_interrupt_is_not() -> None:
    class Panic(BaseException):
        pass

    class Broken(Fixed):
        fault: type[BaseException] = Panic

        def push(self, tokens: Sequence[int]) -> None:
            raise self.fault

    broken = Broken({}, 70)
    push(broken, [1])
    push(broken, [1])
    assert broken.error is not None
    broken.error, broken.fault = None, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        push(broken, [1])


@pytest.mark.parametrize("vocab", [31, 32, 33, 512, 4099])
def test_only_allowed_tokens_keep_their_logits(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((5, vocab)).astype(np.float32)
    allowed = [sorted(rng.choice(vocab, 7, replace=False).tolist()) for _ in range(2)]
    masked = logits.copy()
    apply_masks(masked, np.array([2, 3, 5, 8, 9], np.int32), np.array([3, 9], np.int32), np.stack([bits(a, vocab) for a in allowed]))
    for row, some in ((1, allowed[0]), (4, allowed[1])):
        assert np.flatnonzero(np.isfinite(masked[row])).tolist() == some
        assert (masked[row, some] == logits[row, some]).all()
    for row in (0, 2, 3):
        assert (masked[row] == logits[row]).all()


@pytest.mark.parametrize(
    "way", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.5}, {"temperature": 1.0, "top_k": 3, "min_p": 0.2}]
)
def test_a_forbidden_token_is_never_drawn(way: dict[str, float]) -> None:
    vocab, rows = 300, 200
    rng = np.random.default_rng(1)
    logits = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, 7] = 50.0  # forbidden everywhere, and what every row would take
    allowed = [sorted(rng.choice(np.delete(np.arange(vocab), 7), 1 + r % 9, replace=False).tolist()) for r in range(rows)]
    f32 = lambda value: np.full(1, value, np.float32)  # noqa: E731
    none, by = np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)

    def drawn(mask_rows: np.ndarray, masks: np.ndarray) -> np.ndarray:
        target, logp, finite = np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_)
        sample(
            logits, np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32),
            f32(way.get("temperature", 0.0)), f32(way.get("top_p", 1.0)), f32(way.get("min_p", 0.0)),
            np.full(1, way.get("top_k", 0), np.int32), np.full(1, 5, np.uint64), np.full(1, 0, np.int32), none, by, none, by,
            mask_rows, masks, target=target, logp=logp, finite=finite,
            top_ids=np.zeros((rows, 0), np.int32), top_logp=np.zeros((rows, 0), np.float32),
        )  # fmt: skip
        assert finite.all() and np.isfinite(logp).all(), "log-probabilities are those of the raw distribution"
        return target

    every = np.arange(rows, dtype=np.int32)
    target = drawn(every, np.stack([bits(a, vocab) for a in allowed]))
    assert all(token in some for token, some in zip(target.tolist(), allowed, strict=True))
    assert (drawn(every[:0], np.zeros((0, 0), np.uint32)) == 7).all(), "without masks all take the forbidden one"
