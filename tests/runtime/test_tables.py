"""Page tables kept from step to step, pages taken ahead, and plans made ready under the draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime import cycle, tables
from runtime.rows import Planner
from runtime.sequence import Sequence
from runtime.stream import TextStream
from runtime.tables import PageTables
from runtime.types import Emission, Request, StepPlan
from tests.language import Letters, make_request
from tests.runtime.test_scheduler import PAGE, decoding, finish_step, line, make_scheduler
from tests.scripted import make_engine, scattered
from tests.workloads import alone, executor, outcome, steady_requests

STEADY = steady_requests()
ALONE = alone(STEADY)


def some_sequence(name: str) -> Sequence:
    request = make_request(name, [1, 2, 3])
    return Sequence(request, request.sampling, TextStream(Letters(), request.sampling, frozenset()), PAGE)


def from_scratch(batch: list[Sequence]) -> list[list[int]]:
    widest = max(sequence.page_count for sequence in batch)
    return [[*sequence.pages.tolist(), *[0] * (widest - sequence.page_count)] for sequence in batch]


def wrong_tables(rng: np.random.Generator, rounds: int = 300) -> int:
    """Sequences come, go, gain and lose pages; every table that is handed out must be that of now, and stay as it was."""
    everybody, held, wrong, kept = [some_sequence(str(i)) for i in range(6)], PageTables(), 0, list[tuple[np.ndarray, list[list[int]]]]()
    batch = everybody[:3]
    for _ in range(rounds):
        if rng.random() < 0.2:
            batch = [everybody[i] for i in rng.permutation(6)[: rng.integers(1, 6)]]
        for sequence in everybody:
            if rng.random() < 0.2:
                sequence.add_pages(rng.integers(1, 99, int(rng.integers(1, 4))).tolist())
            elif rng.random() < 0.2:
                sequence.cut_pages(int(rng.integers(0, sequence.page_count + 1)))
        if (found := held.find(batch)) is not None:
            wrong += found.tolist() != from_scratch(batch)
        kept.append((held.of(batch), from_scratch(batch)))
        again = held.find(list(batch))
        wrong += again is not kept[-1][0] or again is not held.of(batch)
    return wrong + sum(table.tolist() != want for table, want in kept)


def test_tables_are_those_of_now_and_stay_as_they_were(rng: np.random.Generator) -> None:
    assert wrong_tables(rng) == 0
    held, a, b = PageTables(), some_sequence("a"), some_sequence("b")
    a.add_pages([3])
    b.add_pages([4])
    assert held.of([a]) is held.find([a]) and held.find([b]) is None and held.of([b]).tolist() == [[4]], "of as many edits, but another"


def test_mutation_edits_unnoticed_and_tables_written_in_place(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PageTables, "find", lambda self, batch: self._pages if batch == self._batch else None)
        assert wrong_tables(rng) > 0
    original = tables._tables

    def in_place(batch: Any, edits: Any, known: Any, held: np.ndarray) -> np.ndarray:
        made = original(batch, edits, known, held)
        if made.shape == held.shape:
            held[:] = made
            return held
        return made

    with monkeypatch.context() as patch:
        patch.setattr(tables, "_tables", in_place)
        assert wrong_tables(rng) > 0


def test_pages_are_taken_ahead_where_there_are_plenty_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_pages=41, caching=False)
    members = decoding(scheduler, 3, length=6)
    assert scheduler.expect([9, 9, 9]) == [], "nothing is known of the next step before `prepare`"
    scheduler.prepare()
    shares = scheduler.expect([9, 9, 9])
    assert [share.sequence for share in shares] == members
    assert [s.page_count for s in members] == [-(-(s.computed + 9) // PAGE) for s in members]
    held = scheduler.pool.held
    assert scheduler.expect([9, 9, 9]) and scheduler.pool.held == held, "they have them already"
    with pytest.raises(AssertionError):
        scheduler.check()
    trees = {s.id: line(s.newest, nodes) for s, nodes in zip(members, (8, 2, 0), strict=True)}
    shares = scheduler.schedule(trees)
    assert [share.nodes for share in shares] == [9, 3, 1]
    give_back = scheduler.give_back
    with monkeypatch.context() as patch, pytest.raises(AssertionError):  # mutation: who got no tree keeps its pages
        patch.setattr(scheduler, "give_back", lambda sequence: give_back(sequence) if sequence is not members[2] else None)
        finish_step(scheduler, shares)
    scheduler.give_back(members[2])
    scheduler.check()


@pytest.mark.parametrize(("nodes", "free"), [([9, 9], 40), ([9, 9, 9], 8), ([40, 40, 40], 40)])
def test_none_are_taken_for_another_batch_or_where_they_are_few(nodes: list[int], free: int) -> None:
    scheduler = make_scheduler(num_pages=1 + free + 6, caching=False)
    decoding(scheduler, 3, length=4)
    scheduler.prepare()
    held = scheduler.pool.held
    assert scheduler.expect(nodes) == [] and scheduler.pool.held == held


def test_none_are_taken_past_the_context() -> None:
    scheduler = make_scheduler(max_len=8)
    [a] = decoding(scheduler, 1, length=5)
    scheduler.prepare()
    held = scheduler.pool.held
    assert scheduler.expect([30]) == [] and scheduler.pool.held == held
    assert scheduler.expect([3]) and a.page_count == 2


def bent(request: Request) -> bool:
    """Plain steps are not rehearsed with them."""
    return request.sampling.frequency_penalty != 0 or request.sampling.min_tokens > 0


def run(speculative: Any = "ddtree") -> list[StepPlan]:
    """As served: what a step leaves is put away under the next draft, or step."""
    model, got = executor(scattered(5)), {request.id: list[Emission]() for request in STEADY if speculative or not bent(request)}
    engine = make_engine(model, speculative)
    for request in STEADY:
        if request.id in got:
            engine.submit(request, got[request.id].append)
    while engine._open and engine.dead is None:
        engine._advance(ahead=True)
    if engine.dead is not None:
        raise engine.dead
    engine._scheduler.check()
    assert engine._scheduler.pool.held == 0
    assert all(outcome(mine) == ALONE[id] for id, mine in got.items())
    return model.plans


def test_plans_made_ready_are_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, used = Planner._spots, [0, 0]

    def spots(self: Planner, starts: list[int]) -> Any:
        found, ahead = ready(self, starts), self._ahead
        used[found is ahead] += 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Planner, "_spots", spots)
        plans = run()
    assert used[1] > 10, "or nothing was ready"
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "get_ready", lambda self, shares: None)
        patch.setattr(cycle.Cycle, "_rehearse", lambda self, *given: None)
        wanted = run()
    assert len(plans) == len(wanted)
    for plan, other in zip(plans, wanted, strict=True):
        for name in ("token", "pos", "slot", "seq", "ctx", "pages", "moves", "out_rows", "ancestors"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(other, name))


def _what_was_ready_is_used_anyway(patch: pytest.MonkeyPatch) -> None:
    original = Planner._spots

    def spots(self: Planner, starts: list[int]) -> Any:
        ahead = self._ahead
        return ahead if ahead is not None and ahead.lines is self._lines else original(self, starts)

    patch.setattr(Planner, "_spots", spots)


def _ready_with_tables_of_before(patch: pytest.MonkeyPatch) -> None:
    """Somebody has got a page since."""
    original = Planner._spots

    def spots(self: Planner, starts: list[int]) -> Any:
        ahead = self._ahead
        return ahead if ahead is not None and ahead.lines is self._lines and ahead.starts == starts else original(self, starts)

    patch.setattr(Planner, "_spots", spots)


def _draft_with_tables_of_before(patch: pytest.MonkeyPatch) -> None:
    """What the drafter reads is the table of the step before the last."""
    original, before = PageTables.find, [None]

    def find(self: PageTables, batch: Any) -> Any:
        now = original(self, batch)
        old, before[0] = before[0], now
        return old if old is not None and now is not None and len(old) == len(now) else now

    patch.setattr(PageTables, "find", find)


MUTATIONS = [_what_was_ready_is_used_anyway, _ready_with_tables_of_before, _draft_with_tables_of_before]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutation_is_noticed(mutate: Any) -> None:
    speculative = None if mutate is _ready_with_tables_of_before else "ddtree"
    run(speculative)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
            run(speculative)
