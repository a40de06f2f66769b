"""Whether to draft: what recent trees were worth against what a draft costs."""

from __future__ import annotations

import numpy as np

from runtime.curve import CostCurve, CurveKey
from runtime.outlook import LONGEST_PROBE, POOL, PROBE, Outlook
from runtime.price import Price

GOOD, POOR = np.tile([0.9, 0.8, 0.5, 0.3], (POOL, 1)), np.full((POOL, 4), 0.01)


def curve(draft_s: float = 0.1, large_s: float = 1.2) -> CostCurve:
    return CostCurve((4, 16, 256), (1.0, large_s, 30.0), key=CurveKey("test", "none", 1), draft_s=(draft_s,))


def asked(outlook: Outlook, held: CostCurve, times: int = 1, streams: int = 4) -> list[bool]:
    return [outlook.pays(Price(held, streams), base=streams, streams=streams) for _ in range(times)]


def test_the_first_draft_is_always_made() -> None:
    assert asked(Outlook(), curve(draft_s=99.0)) == [True]
    assert asked(Outlook(), curve(), streams=0) == [False]


def test_good_drafts_pay_and_poor_ones_do_not() -> None:
    good, poor = Outlook(), Outlook()
    good.observe(GOOD)
    poor.observe(POOR)
    assert all(asked(good, curve(), 100))
    assert asked(poor, curve(), PROBE - 1) == [False] * (PROBE - 1)
    assert asked(good, curve(draft_s=50.0)) == [False], "mutation: leaving the draft out of the cost"
    assert asked(good, curve(large_s=40.0)) == [False], "verifying costs more than it brings"


def test_probes_become_rare() -> None:
    outlook = Outlook()
    outlook.observe(POOR)
    answers = asked(outlook, curve(), 100 * PROBE)
    at = [i + 1 for i, answer in enumerate(answers) if answer]
    assert at[:3] == [PROBE, 3 * PROBE, 7 * PROBE] and at[-1] - at[-2] == LONGEST_PROBE
    outlook.observe(GOOD)
    assert asked(outlook, curve()) == [True], "the pool has changed"
    outlook.observe(POOR)
    assert asked(outlook, curve(), PROBE)[-1], "and the next probe is near again"


def test_only_the_last_trees_count() -> None:
    outlook = Outlook()
    outlook.observe(GOOD)
    outlook.observe(np.repeat(POOR[:1], POOL - 1, axis=0))
    outlook.observe(POOR[:1, :2])
    assert asked(outlook, curve()) == [False]
    outlook.observe(np.tile(GOOD, (3, 1)))
    assert asked(outlook, curve()) == [True]


def test_the_pool_stands_for_any_number_of_streams() -> None:
    """One stream on a curve where only its best node pays, and many on one where all rows are free."""
    outlook = Outlook()
    outlook.observe(GOOD[:5])
    held = CostCurve((1, 2, 1024), (1.0, 1.1, 1.1), key=CurveKey("test", "none", 1))
    assert asked(outlook, held, streams=1) == asked(outlook, held, streams=200) == [True]
    assert not outlook.pays(Price(held, 1), base=1, streams=1, most=0)


def test_a_draft_that_paid_speaks_for_the_next_one_alone() -> None:
    outlook, price = Outlook(), Price(curve(), 4)
    outlook.observe(POOR)
    assert asked(outlook, curve()) == [False]
    outlook.settle(price, 4.0, expected=6.0, seconds=1.3, streams=4)
    assert asked(outlook, curve(), 2) == [True, False], "7.7 tokens/s against 4, once"
    outlook.settle(price, 4.0, expected=0.1, seconds=1.1, streams=4)
    assert asked(outlook, curve()) == [False], "3.7 against 4"
