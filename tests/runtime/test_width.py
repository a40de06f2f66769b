"""Trees are grown as large as they are used; what lies beyond is looked at now and then."""

from __future__ import annotations

from runtime.width import LEAST, LOOK, RECENT, Width


def run(width: Width, wanted: list[int]) -> list[int]:
    """Widths of steps that would each use so many nodes if they could."""
    grown = []
    for want in wanted:
        now = width.next()
        width.observe(min(want, now), now)
        grown.append(now)
    return grown


def test_narrow_trees_stay_narrow() -> None:
    grown = run(Width(64), [3] * (3 * LOOK))
    assert grown[0] == 64 and [i for i, w in enumerate(grown) if w == 64] == [0, LOOK, 2 * LOOK]
    assert set(grown) == {64, LEAST}


def test_a_tree_used_to_its_last_node_doubles_the_width() -> None:
    width = Width(64)
    run(width, [3] * 5)
    assert run(width, [60] * 5) == [8, 16, 32, 64, 64]


def test_a_distant_optimum_is_found_at_the_next_look() -> None:
    """A step that sees 40 nodes takes them all, one that sees fewer takes 3: a mixture of experts behind its plateau."""
    width, grown = Width(64), []
    for step in range(2 * LOOK):
        now = width.next()
        width.observe(40 if now >= 40 and step >= 10 else 3, now)
        grown.append(now)
    assert set(grown[1:LOOK]) == {LEAST} and set(grown[LOOK:]) == {64}


def test_the_width_falls_again() -> None:
    width = Width(64)
    run(width, [60] * 5)
    after = run(width, [2] * (RECENT + 10))
    assert after[0] == 64 and after[-1] == LEAST


def test_a_cap_below_the_width_is_no_reason_to_grow() -> None:
    width = Width(64)
    for _ in range(3):
        width.next()
        width.observe(4, 4)
    assert width.next() == LEAST
