"""Nothing waits for what a step says: it is told while the next one is in flight, at once where none follows, in the same order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from runtime.emit import STREAM_FAILED
from runtime.engine import ENGINE_FAILED
from runtime.executor import Pending
from runtime.stream import Pushed, TextStream
from runtime.types import DraftLogits, DraftPlan, Emission, StepPlan, StepResult
from tests.scripted import EOS, Language, ScriptedExecutor, expected_tokens, make_engine, make_request, run_all, scattered, tokens_of
from tests.waits import turns


class Device(ScriptedExecutor):
    """A scripted model whose steps take their time by themselves. flying: number of the step under way, -1: none."""

    flying, step_s = -1, 0.004

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        result, end_s = self.step(plan), time.perf_counter() + self.step_s
        self.flying = self.steps - 1

        def wait() -> None:
            time.sleep(max(0.0, end_s - time.perf_counter()))
            self.flying = -1

        return Pending(lambda: time.perf_counter() >= end_s, wait, lambda: result)

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        result = self.draft(plan)
        return Pending(lambda: False, lambda: None, lambda: result)


def serve(
    engine: Any, requests: Sequence[Any], hear: Callable[[str, Emission], None] = lambda id, emission: None
) -> dict[str, list[Emission]]:
    """Runs requests in the engine's own thread until all have ended."""
    got: dict[str, list[Emission]] = {request.id: [] for request in requests}
    left, done = set(got), threading.Event()

    def listener(id: str) -> Callable[[Emission], None]:
        def listen(emission: Emission) -> None:
            got[id].append(emission)
            hear(id, emission)
            if emission.finish is not None:
                left.discard(id)
                if not left:
                    done.set()

        return listen

    for request in requests:
        engine.submit(request, listener(request.id))
    engine.start()
    assert done.wait(20), "not all have ended"
    engine.shutdown(5)
    return got


def test_a_step_is_told_while_the_next_one_is_in_flight() -> None:
    run, heard = Device(), list[tuple[int, int, bool]]()
    engine = make_engine(run)
    serve(
        engine,
        [make_request("a", [3], max_tokens=9, ignore_eos=True)],
        lambda id, e: heard.append((len(heard), run.flying, bool(e.finish))),
    )
    assert heard[:-1] == [(n, n + 1, False) for n in range(8)], "step n is told during step n + 1, not later"
    assert heard[-1] == (8, -1, True), "nothing follows the last one, so it is told at once"


def test_who_steps_by_hand_gets_the_step_at_once() -> None:
    run = Device()
    engine = make_engine(run)
    engine.submit(make_request("a", [3], max_tokens=3, ignore_eos=True))
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 1] and engine.step() == [] and run.steps == 3


@pytest.mark.parametrize("speculative", [None, "dflash", {"tree_budget": 8}])
def test_emissions_are_those_of_steps_without_overlap(speculative: Any) -> None:
    """Token ends, stop strings, lengths: the same emissions in the same order, and no step more."""
    language = Language()
    language.say([5, 6], [31, 32, 33, 34, 35, EOS])
    stop = (chr(0x100 + 33) + chr(0x100 + 34),)
    requests = [make_request("stop", [5, 6], max_tokens=20, stop=stop), make_request("eos", [5, 6], max_tokens=20, logprobs=1)]
    requests += [make_request(f"{i}", [7, i], max_tokens=5 + i, ignore_eos=True, temperature=0.5) for i in range(4)]
    found = []
    for kind in (Device, ScriptedExecutor):
        run = kind(language, guess=scattered(2) if speculative else None)
        engine = make_engine(run, speculative)
        got = serve(engine, requests) if kind is Device else run_all(engine, requests)
        said = {
            id: [(e.tokens, e.text, e.finish, e.stop_reason, e.logprobs, e.accepted, e.ranks) for e in mine] for id, mine in got.items()
        }
        stats = engine.stats()
        found.append((said, run.steps, stats.generation_tokens, stats.finished, stats.accepted_tokens, stats.pages_used))
    assert found[0] == found[1]


def test_an_abort_follows_what_was_said_before() -> None:
    run = Device()
    engine = make_engine(run)
    hear = lambda id, e: engine.abort("a") if run.flying == 4 else None  # noqa: E731
    got = serve(engine, [make_request("a", [3], max_tokens=90, ignore_eos=True)], hear)["a"]
    assert [e.finish for e in got] == [None] * 5 + ["abort"], "steps 0 to 3, step 4 that was in flight, the end"
    assert tokens_of(got) == expected_tokens(run.language, make_request("a", [3], max_tokens=90, ignore_eos=True), 512)[:5]
    assert engine.stats().pages_used == 0


def test_a_failed_step_comes_after_what_was_said_before() -> None:
    engine = make_engine(Device(fail_at=3))
    got = serve(engine, [make_request("a", [3], max_tokens=9, ignore_eos=True)])["a"]
    assert [e.finish for e in got] == [None, None, None, "error"] and got[-1].error == ENGINE_FAILED


class Fragile(TextStream):
    """Fails at its third push, which it had not foreseen."""

    def push(self, tokens: Sequence[int]) -> Pushed:
        if self._count >= 2:
            raise UnicodeError("no text")
        return super().push(tokens)


@pytest.mark.parametrize("kind", [Device, ScriptedExecutor])
def test_a_stream_that_fails_while_its_next_step_is_in_flight_ends_alone(kind: type[ScriptedExecutor]) -> None:
    engine = make_engine(kind())
    make = engine._make_stream
    engine._make_stream = lambda params: Fragile(make(params)._text, params, frozenset()) if params.max_tokens == 7 else make(params)  # type: ignore[attr-defined]
    requests = [make_request("a", [5], max_tokens=7, ignore_eos=True), make_request("b", [5], max_tokens=9, ignore_eos=True)]
    got = serve(engine, requests)
    assert [(e.finish, e.error, len(e.tokens)) for e in got["a"]] == [(None, None, 1), (None, None, 1), ("error", STREAM_FAILED, 0)]
    assert len(tokens_of(got["b"])) == 9 and engine.dead is None
    engine._scheduler.check()
    stats = engine.stats()
    assert (stats.pages_used, stats.finished["error"], stats.finished["length"]) == (0, 1, 1)


def test_what_was_exposed_is_counted() -> None:
    """Telling takes 16 ms, within steps of 40: hidden, but for the last. By hand each is exposed."""
    exposed, tell_s = [], 0.016
    for served in (True, False):
        run = Device()
        run.step_s = 0.04
        engine = make_engine(run)
        request = make_request("a", [3], max_tokens=12, ignore_eos=True)
        if served:
            serve(engine, [request], lambda id, e: time.sleep(tell_s))
        else:
            engine.submit(request, lambda e: time.sleep(tell_s))
            for _ in turns(lambda engine=engine: engine._open, "requests without an end"):
                engine.step()
        stats = engine._stats  # the last telling included
        assert stats.steps == 12 and stats.stage_s["emit"] >= 12 * tell_s and stats.flown_s >= 12 * run.step_s * 0.9
        exposed.append(stats.exposed_s["emit"])
        assert 0 < sum(stats.bucket_exposed_s.values()) < 0.5 * sum(stats.bucket_s.values()) and stats.late_flights == 0
    assert exposed[0] < 6 * tell_s and exposed[1] >= 12 * tell_s
