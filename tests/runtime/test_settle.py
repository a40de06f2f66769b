"""All requests of a step settled in one go: the same plans, tokens and ends as one by one, and the slow way where one ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime import cycle
from runtime.cycle import Cycle
from runtime.emit import quiet
from runtime.grove import Grove
from runtime.rows import Share
from runtime.sequence import Sequence
from runtime.stream import TextStream
from runtime.types import StepPlan
from runtime.verdicts import Walks
from tests.language import Letters, make_request
from tests.scripted import EOS, make_engine, run_all, scattered
from tests.workloads import alone, executor, outcome, steady_requests

STEADY = steady_requests()
ALONE = alone(STEADY)
METHODS = [None, "dflash", {"tree_budget": 16}]
Way = Callable[[pytest.MonkeyPatch], None]


def run(speculative: Any, requests: Any = STEADY, **options: Any) -> tuple[dict[str, Any], list[StepPlan]]:
    model = executor(scattered(5) if speculative else None, **options)
    got = run_all(make_engine(model, speculative), requests, most_steps=2000)
    return {id: outcome(mine) for id, mine in got.items()}, model.plans


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cycle, "_settle_all", lambda self, *given: False)


def counted(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether steps were settled in one go, as they come."""
    original, found = Cycle._settle_all, list[bool]()

    def settle_all(self: Cycle, *given: Any) -> bool:
        found.append(original(self, *given))
        return found[-1]

    patch.setattr(Cycle, "_settle_all", settle_all)
    return found


@pytest.mark.parametrize("speculative", METHODS)
@pytest.mark.parametrize("num_pages", [44, 400])
def test_plans_and_texts_are_those_of_one_by_one(monkeypatch: pytest.MonkeyPatch, speculative: Any, num_pages: int) -> None:
    found = counted(monkeypatch)
    got, plans = run(speculative, num_pages=num_pages)
    assert sum(found) > 10 and not all(found), "both ways are taken"
    assert got == ALONE
    with monkeypatch.context() as patch:
        one_by_one(patch)
        want, wanted = run(speculative, num_pages=num_pages)
    assert got == want and len(plans) == len(wanted)
    for plan, other in zip(plans, wanted, strict=True):
        for name in ("token", "pos", "slot", "seq", "ctx", "pages", "moves", "out_rows", "ancestors", "adjust_seq"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(other, name))


def test_where_text_decides_everybody_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    requests = steady_requests(3, stop=(chr(0x100 + 7), chr(0x100 + 11)))
    assert run("ddtree", requests)[0] == alone(requests) and not any(found)


class Silent:
    """A stream that foresees nothing."""

    push = flush = None


def test_who_must_be_looked_at() -> None:
    def share(most: int, stream: Any = None, before: int = 0, nodes: int = 3, **params: Any) -> Share:
        request = make_request("a", [1, 2], max_tokens=most, **params)
        stream = stream or TextStream(Letters(), request.sampling, frozenset([EOS]))
        return Share(Sequence(request, request.sampling, stream, 4), 1, before, nodes, ())

    calm = [share(9), share(5, stop_token_ids=(7,)), share(8, ignore_eos=True)]
    assert quiet(calm) == (frozenset([EOS, 7]), 5) and quiet(calm[2:]) == (frozenset(), 8)
    held = share(9)
    held.sequence.constraint = object()  # type: ignore[assignment]
    for other in (held, share(9, stop=("x",)), share(9, Silent()), share(9, before=2), share(9, nodes=0)):
        assert quiet([calm[0], other]) is None


def test_a_row_that_is_not_finite_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    got, _ = run("ddtree", bad_rows=lambda step, plan: [plan.m - 1] if step == 6 else [])
    ended = [id for id in got if got[id][2] == "error"]
    assert len(ended) <= 1 and sum(found) > 10 and not found[6] and not [id for id in got if id not in ended and got[id] != ALONE[id]]


def _ends_unnoticed(patch: pytest.MonkeyPatch) -> None:
    original = cycle.quiet
    patch.setattr(cycle, "quiet", lambda shares: None if (calm := original(shares)) is None else (frozenset[int](), calm[1]))


def _limits_unnoticed(patch: pytest.MonkeyPatch) -> None:
    original = cycle.quiet
    patch.setattr(cycle, "quiet", lambda shares: None if (calm := original(shares)) is None else (calm[0], 1 << 31))


def _one_token_past_the_limit(patch: pytest.MonkeyPatch) -> None:
    original = cycle.quiet
    patch.setattr(cycle, "quiet", lambda shares: None if (calm := original(shares)) is None else (calm[0], calm[1] + 1))


def _stop_strings_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TextStream, "ends", property(lambda self: self._ends))


def _rows_of_the_first_nodes(patch: pytest.MonkeyPatch) -> None:
    """The taps and moves of a tree's first rows, not of those on its path."""
    original = Cycle._settle_all

    def settle_all(self: Cycle, shares: Any, plan: Any, verdicts: Any, calm: Any) -> bool:
        if isinstance(verdicts, Walks):
            starts = verdicts.grove.lines.first.repeat(verdicts.counts)
            nodes = np.concatenate([np.arange(count) for count in verdicts.counts])
            found = Walks(verdicts.grove, starts + nodes, verdicts.edges, verdicts.tokens)
            return original(self, shares, plan, found, calm)
        return original(self, shares, plan, verdicts, calm)

    patch.setattr(Cycle, "_settle_all", settle_all)


def _places_of_the_first_tree(patch: pytest.MonkeyPatch) -> None:
    """All accepted nodes moved to where the step's first rows are."""
    original = Cycle._leave
    patch.setattr(Cycle, "_leave", lambda self, plan, rows, places: original(self, plan, rows, np.arange(len(places))))


def _twins_are_all_on_the_path(patch: pytest.MonkeyPatch) -> None:
    """Where a draw leads to several nodes each of them counts."""
    patch.setattr(Grove, "leaps", property(lambda self: [np.maximum(self.parent, 0) + self.lines.start]))


MUTATIONS: list[Way] = [
    _ends_unnoticed,
    _limits_unnoticed,
    _one_token_past_the_limit,
    _stop_strings_unnoticed,
    _rows_of_the_first_nodes,
    _places_of_the_first_tree,
    _twins_are_all_on_the_path,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutation_is_noticed(mutate: Way) -> None:
    requests = steady_requests(3, stop=(str(ALONE["s0"][1])[20],)) if mutate is _stop_strings_unnoticed else STEADY
    want = alone(requests)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
            assert run("ddtree", requests)[0] == want
