"""What draft nodes are charged beside prompt rows: by hand, and what follows for the choice of n."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.budget import allocate
from runtime.curve import CostCurve, CurveKey
from runtime.price import Price

KEY = CurveKey("test", "none", 1)


def curve(buckets: tuple[int, ...] = (8, 16, 64, 256), seconds: tuple[float, ...] = (1.0, 2.0, 4.0, 10.0)) -> CostCurve:
    return CostCurve(buckets, seconds, key=KEY, draft_s=(0.25,), overhead_s=0.5)


def test_a_step_without_prompts_costs_what_the_curve_says() -> None:
    price = Price(curve(), 6)
    assert price.seconds(np.array([0, 2, 3, 10, 11]), 6).tolist() == [1.75, 1.75, 2.75, 2.75, 4.75]
    assert float(price.seconds(0, 0)) == 1.5 and price.most == 250
    assert price.counts(20).tolist() == [0, 2, 10, 20] and price.counts(0).tolist() == [0]


def test_streams_pay_for_themselves_and_for_what_their_nodes_add() -> None:
    """6 roots and 20 prompt rows are in the bucket of 64: 38 nodes are free there, and the prompts' 3 s are not theirs."""
    price = Price(curve(), 6, prompt=20)
    assert price.seconds(np.array([0, 38, 39]), 6).tolist() == [1.75, 1.75, 0.75 + 1.0 + 6.0]
    assert price.counts(100).tolist() == [0, 38, 100]


def test_a_displaced_prompt_row_is_paid_later() -> None:
    """With 80 of 96 rows full of prompts the 17th node takes the place of one: 9 s more over 90 rows, 0.1 s each."""
    price = Price(curve(), 6, prompt=1000, limit=96, reserved=24)
    assert price.most == 66
    assert price.seconds(np.array([0, 1, 66]), 0).tolist() == pytest.approx([1.5, 1.6, 8.1])
    assert price.counts(3).tolist() == [0, 1, 2, 3], "every n may be best where each has its price"
    some = Price(curve(), 6, prompt=80, limit=96, reserved=24)
    assert some.counts(99).tolist() == [0, *range(10, 67)] and some.seconds(np.array([10, 11]), 0).tolist() == pytest.approx([1.5, 1.6])


def chosen(price: Price, value: float = 0.3, nodes: int = 60) -> int:
    offered = np.full((price.roots, nodes), value)
    return allocate(offered, price, base=price.roots, drafted=price.roots).total


def test_a_long_prompt_beside_decoding_streams() -> None:
    """On a saturating curve the same streams verify more where prompts have opened a large bucket, none where rows are dear."""
    edges = tuple(range(4, 260, 4))
    saturating = CostCurve(edges, tuple(1.0 + min(m, 128) / 16 for m in edges), key=KEY)
    alone, beside = Price(saturating, 8), Price(saturating, 8, prompt=150, limit=256, reserved=64)
    assert chosen(alone, 0.1) == 0 and chosen(beside, 0.1) >= 98
    linear = CostCurve(edges, tuple(1.0 + m / 16 for m in edges), key=KEY)
    for prompt in (0, 40, 4000):
        assert chosen(Price(linear, 8, prompt, 256, 64), 0.04) == 0, "mutation: the prompts' time in the denominator makes nodes look cheap"
        assert chosen(Price(linear, 8, prompt, 256, 64), 0.95) > 100


@given(
    st.integers(1, 70),
    st.integers(0, 400),
    st.integers(8, 400),
    st.integers(0, 100),
    st.lists(st.floats(0.01, 5.0), min_size=4, max_size=4),
)
def test_no_count_is_cheaper_than_the_roots_alone(roots: int, prompt: int, limit: int, reserved: int, times: list[float]) -> None:
    held = curve(seconds=tuple(np.cumsum(times).tolist()))
    price = Price(held, roots, prompt, limit, reserved)
    counts = price.counts(price.most)
    assert counts[0] == 0 and (np.diff(counts) > 0).all() and counts[-1] == price.most
    found = price.seconds(counts, roots)
    assert (np.diff(found) >= -1e-12).all() and found[0] == pytest.approx(held.step_seconds(roots, roots))
