"""Following a device's choices of experts: where two are equally good, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_np import moe
from tests.near_ties import Followed, Following

LOGITS = np.array([[2.0, 1.0, 0.98, -1.0], [3.0, 2.0, 0.0, 1.0]], np.float32)  # sigmoids of the first: .881 .731 .727 .269
BIAS = np.array([0.0, 0.0, 0.002, 0.0], np.float32)  # leaves the second's gap at 0.00195
SCALE = 2.5


def chosen(theirs: list[list[int]], tie: float = 0.005) -> tuple[np.ndarray, np.ndarray, Following]:
    """(expert, weight, definition) of LOGITS beside a device that chose `theirs`."""
    backend = Following(tie)
    backend.follow([np.array(theirs, np.int32)])
    expert, weight = np.empty((2, 2), np.int32), np.empty((2, 2), np.float32)
    backend.route(LOGITS, np.eye(4, dtype=np.float32), BIAS, SCALE, expert=expert, weight=weight)
    return expert, weight, backend


def test_the_same_experts_in_another_order_are_no_difference():
    expert, weight, backend = chosen([[1, 0], [1, 0], [7, 7]])  # the third row is dead
    own = np.empty_like(expert), np.empty_like(weight)
    moe.route(LOGITS, np.eye(4, dtype=np.float32), BIAS, SCALE, expert=own[0], weight=own[1])
    np.testing.assert_array_equal(expert, own[0])
    np.testing.assert_array_equal(weight, own[1])
    assert not backend.followed


def test_a_near_tie_is_the_devices():
    """Weights are of the scores without the bias; the other row stays as it is."""
    expert, weight, backend = chosen([[0, 2], [0, 1]])
    np.testing.assert_array_equal(np.sort(expert), [[0, 2], [0, 1]])
    score = 1.0 / (1.0 + np.exp(-np.take_along_axis(LOGITS, expert, 1).astype(np.float64)))
    np.testing.assert_allclose(weight, SCALE * score / score.sum(1, keepdims=True), rtol=1e-6)
    (found,) = backend.followed
    assert found == Followed(0, 0, pytest.approx(1 / (1 + np.exp(-1.0)) - 1 / (1 + np.exp(-0.98)) - 0.002, abs=1e-6))


@pytest.mark.parametrize(
    ("theirs", "tie", "said"),
    [
        ([[0, 2], [0, 1]], 0.001, r"layer 0, row 0: experts \[0, 2\] for \[0, 1\], a gap of 0.0020"),
        ([[0, 3], [0, 1]], 0.005, r"layer 0, row 0: .* a gap of 0.4621"),
        ([[1, 2], [0, 1]], 0.005, r"layer 0, row 0: .* a gap of 0.1517"),
        ([[0, 1], [0, 0]], 0.005, r"layer 0, row 1: .* are no choice of 4"),
        ([[0, 1], [0, 4]], 0.005, r"layer 0, row 1: .* are no choice of 4"),
        ([[0, 1], [0, -1]], 0.005, r"layer 0, row 1: .* are no choice of 4"),
    ],
)
def test_mutation_other_choices_are_errors(theirs, tie, said):
    with pytest.raises(AssertionError, match=said):
        chosen(theirs, tie)
