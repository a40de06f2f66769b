"""What keeps contexts in order, broken one thing at a time: a plan must break or a token change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime import cycle, pages, sequence
from runtime.cycle import Cycle
from runtime.pages import PagePool
from runtime.scheduler import Scheduler
from runtime.speculate import Taps
from runtime.types import StepPlan
from runtime.verdicts import Verdict
from tests.language import expected_tokens, make_request
from tests.scripted import EOS, make_engine, run_all, scattered, tokens_of
from tests.workloads import LANGUAGE, MAX_LEN, REQUESTS, differing, executor, plain_outcomes


def run_under_pressure() -> None:
    """Few pages and preemption; then, with pages enough, requests that go on where finished ones ended.

    Prompts of the second round: a finished request with its output and one token more (its last pages
    must have been completed after its end), the beginning of one that fills its pages exactly, one
    with its first token changed (its later pages are alike but on another path).
    """
    tight = make_engine(executor(scattered(5), num_pages=44), "ddtree")
    roomy = make_engine(executor(scattered(6), num_pages=1000), "ddtree")
    for engine in (tight, roomy):
        got = run_all(engine, REQUESTS, most_steps=2000)
        assert not differing(got)
    more = []
    for request in REQUESTS[:20]:
        whole = [*request.prompt.tolist(), *tokens_of(got[request.id])][: MAX_LEN - 20]
        prompts = [[*whole, 2], whole[: len(whole) // 4 * 4], [whole[0] ^ 1, *whole[1:]]]
        more += [make_request(f"{request.id}+{i}", prompt, max_tokens=12) for i, prompt in enumerate(prompts) if prompt]
    got = run_all(roomy, more, most_steps=2000)
    assert not [r.id for r in more if tokens_of(got[r.id]) != expected_tokens(LANGUAGE, r, MAX_LEN, [EOS])]
    assert sum(emissions[0].cached_tokens > 0 for emissions in got.values()) >= 40


def _no_moves(patch: pytest.MonkeyPatch) -> None:
    original = Cycle._find_moves

    def find(self: Cycle) -> None:
        original(self)
        self._moves = self._moves[:0]

    patch.setattr(Cycle, "_find_moves", find)


def _moves_backwards(patch: pytest.MonkeyPatch) -> None:
    original = Cycle._find_moves

    def find(self: Cycle) -> None:
        original(self)
        self._moves = self._moves[:, ::-1]

    patch.setattr(Cycle, "_find_moves", find)


def _first_nodes_tapped(patch: pytest.MonkeyPatch) -> None:
    """Taps of the first rows of a tree in place of the accepted ones."""
    original = Cycle._leave

    def leave(self: Cycle, plan: StepPlan, rows: np.ndarray, places: np.ndarray) -> None:
        original(self, plan, rows, places)
        self._taps = Taps(places, self._taps.pos, self._taps.slot)

    patch.setattr(Cycle, "_leave", leave)


def _taps_at_node_slots(patch: pytest.MonkeyPatch) -> None:
    original = Cycle._leave

    def leave(self: Cycle, plan: StepPlan, rows: np.ndarray, places: np.ndarray) -> None:
        original(self, plan, rows, places)
        self._taps = Taps(self._taps.rows, self._taps.pos, plan.slot[rows])

    patch.setattr(Cycle, "_leave", leave)


def _taps_of_the_ended_dropped(patch: pytest.MonkeyPatch) -> None:
    original = Cycle._commit

    def commit(self: Cycle, share, found) -> int:  # type: ignore[no-untyped-def]
        keep = original(self, share, found)
        return keep if found is None or found.finish is None else share.start

    patch.setattr(Cycle, "_commit", commit)


def _keys_without_their_past(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence, "page_key", lambda previous, tokens: pages.page_key(b"", tokens))


def _all_tokens_found(patch: pytest.MonkeyPatch) -> None:
    """Not even the newest token is computed again."""
    original = Scheduler._admit

    def admit(self: Scheduler) -> None:
        for waiting in self.waiting:
            keys = waiting.keys
            waiting.keys = lambda _, keys=keys, waiting=waiting: keys(waiting.length // self.pool.page_size)  # type: ignore[method-assign]
        original(self)

    patch.setattr(Scheduler, "_admit", admit)


def _preempted_without_losing_context(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.preempt

    def preempt(self: Scheduler, victim) -> None:  # type: ignore[no-untyped-def]
        computed = victim.computed
        original(self, victim)
        victim.computed = computed

    patch.setattr(Scheduler, "preempt", preempt)


def _pages_released_twice(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.give_back

    def give_back(self: Scheduler, member) -> None:  # type: ignore[no-untyped-def]
        original(self, member)
        if self.stats.steps == 9:
            self.pool.release(member.pages.tolist()[-1:])

    patch.setattr(Scheduler, "give_back", give_back)


def _one_node_too_many(patch: pytest.MonkeyPatch) -> None:
    original = cycle.judge

    def judge(trees, target, sound) -> list[Verdict]:  # type: ignore[no-untyped-def]
        found = list(original(trees, target, sound))
        for tree, verdict in zip(trees, found, strict=True):
            if verdict.path[-1] + 1 < len(tree):
                verdict.path.append(verdict.path[-1] + 1)
                verdict.tokens.append(int(target[verdict.first_out + verdict.path[-1]]))
        return found

    patch.setattr(cycle, "judge", judge)


def _unsafe_reuse(patch: pytest.MonkeyPatch) -> None:
    """The page registered last is found for every key."""
    patch.setattr(PagePool, "find", lambda self, keys: list(self._by_key.values())[-1:] if len(keys) else [])


MUTATIONS = [
    _no_moves,
    _moves_backwards,
    _first_nodes_tapped,
    _taps_at_node_slots,
    _taps_of_the_ended_dropped,
    _keys_without_their_past,
    _all_tokens_found,
    _preempted_without_losing_context,
    _pages_released_twice,
    _one_node_too_many,
    _unsafe_reuse,
]


def test_pressure_alone_breaks_nothing() -> None:
    run_under_pressure()


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutation_is_noticed(mutate: Callable[[pytest.MonkeyPatch], None]) -> None:
    plain_outcomes()  # what plain decoding says is worked out before anything is broken
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
            run_under_pressure()
