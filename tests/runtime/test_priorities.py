"""Priorities, seats and chunk limits, and what a request may ask of the node budget."""

from __future__ import annotations

import time

import numpy as np
import pytest

from runtime.allocate import BudgetSpeculation
from runtime.budget import stream_weights
from runtime.config import EngineConfig
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.stream import TextStream
from runtime.types import InvalidRequest, SamplingParams
from tests.language import Letters, make_request, scattered
from tests.runtime.test_allocate import AUTO, curve, frozen
from tests.runtime.test_scheduler import PAGE, finish_step, make_scheduler, rows_of
from tests.scripted import make_engine, run_all
from tests.workloads import REQUESTS, differing, executor


def add(scheduler: Scheduler, name: str, length: int, **params: object) -> Sequence:
    request = make_request(name, np.arange(length) + ord(name) * 1000, max_tokens=50, **params)
    sequence = Sequence(request, request.sampling, TextStream(Letters(), request.sampling, frozenset()), PAGE)
    scheduler.add(sequence)
    return sequence


def test_lower_priority_goes_first_and_equals_by_arrival() -> None:
    scheduler = make_scheduler(max_seqs=2)
    for name, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 0), ("e", -3)):
        add(scheduler, name, 5, priority=priority)
    assert [s.id for s in scheduler.waiting] == ["c", "e", "a", "d", "b"]
    assert [name for name, *_ in rows_of(scheduler.schedule({}))] == ["c", "e"]
    add(scheduler, "f", 5, priority=-9)
    assert [s.id for s in scheduler.running] == ["c", "e"], "nobody who runs is sent away for a seat"
    scheduler.remove(scheduler.running[0])
    finish_step(scheduler, scheduler.schedule({}))
    assert [s.id for s in scheduler.running] == ["f", "e"] and [s.id for s in scheduler.waiting] == ["a", "d", "b"]


def test_the_last_in_order_loses_its_pages_and_keeps_its_place() -> None:
    scheduler = make_scheduler(num_pages=9, max_seqs=3)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        add(scheduler, name, 7, priority=priority)
    for _ in range(6):
        finish_step(scheduler, scheduler.schedule({}))
    assert [s.id for s in scheduler.running] == ["c", "a"] and [s.id for s in scheduler.waiting] == ["b"]
    assert scheduler.stats.preemptions >= 1
    add(scheduler, "d", 7, priority=1)
    assert [s.id for s in scheduler.waiting] == ["b", "d"], "it arrived first"


def test_seats_bound_admission_alone() -> None:
    scheduler = make_scheduler()
    for name in "abcd":
        add(scheduler, name, 4)
    scheduler.seats = 2
    finish_step(scheduler, scheduler.schedule({}))
    assert [s.id for s in scheduler.running] == ["a", "b"]
    scheduler.seats = 1
    assert [name for name, *_ in rows_of(scheduler.schedule({}))] == ["a", "b"]
    finish_step(scheduler, [])
    assert scheduler.load().prompt == 0, "no seat, so the waiting prompts bring no rows"
    scheduler.seats = 3
    assert scheduler.load().prompt == 4, "one of them will be admitted"


def test_chunks_are_short_while_anybody_decodes() -> None:
    scheduler = make_scheduler(max_rows=32)
    scheduler.chunk = 5
    add(scheduler, "a", 20)
    assert rows_of(scheduler.schedule({})) == [("a", 0, 20)], "nobody waits for a token yet"
    finish_step(scheduler, scheduler.schedule({}))
    add(scheduler, "b", 14)
    assert (scheduler.load().decoding, scheduler.load().prompt) == (1, 5)
    seen = []
    for _ in range(4):
        shares = scheduler.schedule({})
        seen.append(rows_of(shares)[1])
        finish_step(scheduler, shares)
    assert seen == [("b", 0, 5), ("b", 5, 5), ("b", 10, 4), ("b", 14, 1)]


def test_roots_carry_caps_and_weights() -> None:
    scheduler = make_scheduler()
    wanted = {"a": {}, "b": {"tree_budget": 3}, "c": {"tree_budget": 0}, "d": {"draft_weight": 2.5}}
    members = [add(scheduler, name, 4, extra_args=extra) for name, extra in wanted.items()]
    finish_step(scheduler, scheduler.schedule({}))
    roots = {root.id: root for root in scheduler.roots(40, 7)}
    assert set(roots) == {"a", "b", "d"} and roots["b"].most == 3 and roots["a"].most == 40
    assert [roots[name].weight for name in "abd"] == [1.0, 1.0, 2.5]
    assert members[2].most_nodes == 0


def test_weights_follow_priority_and_target() -> None:
    scheduler = make_scheduler()
    assert [add(scheduler, "a", 4, priority=p).draft_weight(0.0) for p in (-9, -2, 0, 1, 30)] == [8.0, 4.0, 1.0, 0.5, 0.125]
    late = add(scheduler, "b", 4, extra_args={"tpot_target_ms": 20.0})
    assert late.draft_weight(time.monotonic()) == 1.0, "nothing is known yet"
    late.append([1])
    late.append([1] * 10)
    for took_s, weight in ((0.2, 1.0), (0.4, 4.0), (0.1, 0.25), (9.0, 8.0)):
        assert late.draft_weight(late.first_token_s + took_s) == pytest.approx(weight)
    value = np.full((3, 4), 0.5)
    assert stream_weights(value, np.array([2.0, 1.0, 3.0])).tolist() == [1.0, 0.5, 1.5]
    assert stream_weights(value[:1], np.array([7.0])).tolist() == [1.0]


def test_weighted_requests_get_more_nodes_and_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {}
    for weight in (1.0, 8.0):
        held = frozen(curve((1.0, 1.2, 40.0, 400.0)), monkeypatch)
        run = executor(guess=scattered(5))
        made = make_engine(run, speculator=BudgetSpeculation(run, AUTO, held))
        requests = [
            make_request(f"r{i}", [i + 1, 2], max_tokens=40, extra_args={"draft_weight": weight if i == 0 else 1.0}) for i in range(4)
        ]
        got = run_all(made, requests)
        assert differing(run_all(make_engine(executor(guess=scattered(5))), REQUESTS)) == []
        nodes[weight] = sum(e.drafted for e in got["r0"][:8])
    assert nodes[8.0] > 1.2 * nodes[1.0]


def test_what_is_refused() -> None:
    run = executor(guess=scattered(5))
    with pytest.raises(InvalidRequest, match="priority: -1, but requests are served as they arrive"):
        make_engine(run).submit(make_request("a", [1], priority=-1))
    make_engine(run, scheduling_policy="priority").submit(make_request("a", [1], priority=-1))
    for extra, text in (
        ({"speed": 1}, "extra_args: 'speed' is unknown; known: tree_budget"),
        ({"tree_budget": 2.5}, r"extra_args.tree_budget: 2.5 is not an integer in \[0, 1023\]"),
        ({"draft_weight": 0}, r"extra_args.draft_weight: 0 is not a number in \[0.1, 10\]"),
        ({"tpot_target_ms": True}, "extra_args.tpot_target_ms: True"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            SamplingParams(extra_args=extra)
    for bad, text in (({"scheduling_policy": "lifo"}, "'lifo' is none of fcfs, priority"), ({"tpot_target_ms": 0}, "tpot_target_ms: 0")):
        with pytest.raises(ValueError, match=text):
            EngineConfig(**bad)
