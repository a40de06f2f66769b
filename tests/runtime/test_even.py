"""Comparing nodes or sharing them: both are priced with what the host takes."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.curve import CostCurve, CurveKey
from runtime.even import LEAST, LOOK, Even
from runtime.host_cost import HostCost
from runtime.outlook import Outlook
from runtime.price import Price

ALIKE = np.tile([0.9, 0.8, 0.7, 0.1, 0.1, 0.1, 0.1], (4, 1))
UNLIKE = np.concatenate([np.full((1, 7), 0.9), np.full((3, 7), 0.3)])
CURVE = CostCurve((4, 8, 16, 32), (1.0, 1.4, 1.8, 9.0), key=CurveKey("test", "none", 1))


def even_after(value: np.ndarray, gain: float, choice_s: float, share_s: float, times: int = LEAST) -> Even:
    outlook = Outlook()
    outlook.observe(value)
    even = Even(outlook)
    even.hear(4, 0, choice_s, 6.0, 6.0)
    even.hear(4, 3, share_s, 6.0, 6.0)
    price = Price(CURVE, 4)
    for _ in range(times):
        even.compare(price, value, 28, gain, float(price.seconds(12, 4)))
    return even


def shares(even: Even) -> int:
    return even.share(Price(CURVE, 4), 4, 28)[0]


def test_alike_streams_share_where_a_choice_takes_the_host_longer() -> None:
    gain = float(np.sort(ALIKE, axis=None)[-12:].sum())
    assert shares(even_after(ALIKE, gain, 0.2, 0.1)) == 3, "16 rows: the third node is worth its place, the fourth opens the next bucket"
    assert shares(even_after(ALIKE, gain, 0.1, 0.2)) == 0
    assert shares(even_after(ALIKE, gain, 0.2, 0.1, times=LEAST - 1)) == 0, "too early to tell"


def test_what_a_choice_gains_pays_its_time() -> None:
    gain = float(np.sort(UNLIKE, axis=None)[-12:].sum())
    assert shares(even_after(UNLIKE, gain, 0.2, 0.1)) == 0
    assert shares(even_after(UNLIKE, gain, 5.0, 0.1)) > 0


def test_the_nodes_are_compared_now_and_then() -> None:
    even = even_after(ALIKE, float(np.sort(ALIKE, axis=None)[-12:].sum()), 0.2, 0.1)
    assert [bool(shares(even)) for _ in range(2 * LOOK)] == 2 * ([True] * (LOOK - 1) + [False])


def test_what_four_streams_do_says_nothing_of_eight() -> None:
    even = even_after(ALIKE, float(np.sort(ALIKE, axis=None)[-12:].sum()), 0.2, 0.1)
    assert even.share(Price(CURVE, 3), 3, 21)[0] and not even.share(Price(CURVE, 8), 8, 56)[0]


def test_what_came_of_choices_counts_not_what_was_expected() -> None:
    gain, found = float(np.sort(UNLIKE, axis=None)[-12:].sum()), []
    for came in (6.0, 2.0):
        even = even_after(UNLIKE, gain, 0.2, 0.1, times=0)
        for _ in range(LEAST):
            even.hear(4, 0, 0.2, came, 6.0)
        for _ in range(LEAST):
            even.compare(Price(CURVE, 4), UNLIKE, 28, gain, float(Price(CURVE, 4).seconds(12, 4)))
        found.append(shares(even) > 0)
    assert found == [False, True]


def test_a_pause_of_the_machine_is_no_cost_of_the_method() -> None:
    even = even_after(ALIKE, float(np.sort(ALIKE, axis=None)[-12:].sum()), 0.2, 0.1)
    for _ in range(3):
        even.hear(4, 0, 50.0, 6.0, 6.0)
        even.hear(4, 0, 0.2, 6.0, 6.0)
    assert even._of(4).choice.value < 0.4


@pytest.mark.parametrize(("most", "nodes"), [(28, 3), (11, 2), (3, 0)])
def test_a_share_fits_into_the_step(most: int, nodes: int) -> None:
    outlook = Outlook()
    outlook.observe(ALIKE)
    found, expected = outlook.even(Price(CURVE, 4), 4, most, HostCost(0.0))
    assert found == nodes and expected == pytest.approx(4 * ALIKE[0, :nodes].sum())
