"""Faults: rows that are not finite, streams and listeners that raise, an executor that dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from runtime.cycle import Cycle
from runtime.emit import NON_FINITE, STREAM_FAILED
from runtime.engine import ENGINE_FAILED, EngineDead
from runtime.pages import PagePool
from runtime.types import Emission, StepPlan
from tests.language import path_of
from tests.scripted import (
    EOS,
    Language,
    ScriptedExecutor,
    accept_runs,
    expected_tokens,
    make_engine,
    make_request,
    run_all,
    scattered,
    step_until,
    tokens_of,
)

PROMPTS = [[10 + i, *range(20, 31)] for i in range(4)]  # 12 tokens, 3 pages
BAD = 1  # the request that goes wrong


def requests(**sampling: Any) -> list[Any]:
    return [make_request(f"{i}", prompt, max_tokens=30, ignore_eos=True, **sampling) for i, prompt in enumerate(PROMPTS)]


def rows_of(first_token: int, plan: StepPlan, executor: ScriptedExecutor) -> list[int]:
    """Rows of the sequence whose prompt begins with a token, found by the path in its first slot."""
    for b, ctx in enumerate(plan.ctx.tolist()):
        first = int(plan.pages[b, 0]) * executor.limits.page_size
        rows = [row for row in range(plan.m) if plan.seq[row] == b]
        if (ctx == 0 and plan.token[rows[0]] == first_token) or (ctx and int(executor._target.path[first]) == path_of([first_token])):
            return rows
    return []


def spoil(step: int, rows: Callable[[Sequence[int], StepPlan], Iterable[int]], guess: Any = None, **options: Any) -> ScriptedExecutor:
    """An executor whose rows of request BAD, as picked, come out NaN in one step."""
    executor = ScriptedExecutor(guess=guess, **options)

    def bad_rows(now: int, plan: StepPlan) -> Iterable[int]:
        return rows(rows_of(10 + BAD, plan, executor), plan) if now == step else ()

    executor.bad_rows = bad_rows
    return executor


METHODS = {"none": (None, None), "chain": (lambda: accept_runs([3, 1]), "dflash"), "tree": (lambda: scattered(7), {"tree_budget": 12})}


def check_alone(got: dict[str, list[Emission]], language: Language) -> None:
    """The bad request ends in an error after tokens that are right; the others have all of theirs."""
    for request in requests():
        want, emissions = expected_tokens(language, request, 512), got[request.id]
        if request.id == str(BAD):
            assert (emissions[-1].finish, emissions[-1].error) == ("error", NON_FINITE)
            assert tokens_of(emissions) == want[: len(tokens_of(emissions))] and len(tokens_of(emissions)) < 30
        else:
            assert tokens_of(emissions) == want and emissions[-1].finish == "length"


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_row_ends_its_request_alone(method: str) -> None:
    guess, speculative = METHODS[method]
    executor = spoil(5, lambda rows, plan: rows[:1], guess() if guess else None)
    engine = make_engine(executor, speculative)
    check_alone(run_all(engine, requests()), executor.language)
    stats = engine.stats()
    assert (stats.corrupted_requests, stats.finished["error"], stats.finished["length"], stats.pages_used) == (1, 1, 3, 0)
    again = make_request("again", PROMPTS[BAD], max_tokens=30, ignore_eos=True)
    got = run_all(engine, [again, make_request("other", PROMPTS[BAD + 1], max_tokens=5)])
    assert tokens_of(got["again"]) == expected_tokens(executor.language, again, 512)
    assert got["again"][0].cached_tokens == 0, "nothing of a corrupted request is used again"
    assert got["other"][0].cached_tokens == 8


def test_mutation_corrupted_prefix_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "forget", lambda self, pages: None)
    with pytest.raises(AssertionError, match="used again"):
        test_a_bad_row_ends_its_request_alone("none")


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_bad_row_inside_a_prompt_is_noticed_at_its_end(chunk: int) -> None:
    """Its pages are not found by a request with the same prompt that comes before anybody has noticed."""
    executor = spoil(chunk, lambda rows, plan: rows[:1], max_rows=5)
    engine = make_engine(executor, max_num_seqs=2)
    got: dict[str, list[Emission]] = {"bad": [], "same": []}
    engine.submit(make_request("bad", PROMPTS[BAD], max_tokens=5), got["bad"].append)
    engine.step()
    engine.step()
    same = make_request("same", [*PROMPTS[BAD], 40], max_tokens=5, ignore_eos=True)
    engine.submit(same, got["same"].append)
    step_until(engine, lambda: all(g and g[-1].finish for g in got.values()))
    assert [(e.finish, e.tokens) for e in got["bad"]] == [("error", ())]
    assert tokens_of(got["same"]) == expected_tokens(executor.language, same, 512) and got["same"][0].cached_tokens == 0


def test_mutation_pages_registered_before_a_finite_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Cycle._commit

    def commit(self: Cycle, share: Any, found: Any) -> int:
        keep = original(self, share, found)
        if found is None:
            for i in range(share.sequence.registered, keep // self._pool.page_size):
                self._pool.register(int(share.sequence.pages[i]), share.sequence.key(i))
            share.sequence.registered = keep // self._pool.page_size
        return keep

    monkeypatch.setattr(Cycle, "_commit", commit)
    with pytest.raises(AssertionError):
        test_a_bad_row_inside_a_prompt_is_noticed_at_its_end(0)


def test_tokens_before_the_bad_row_of_a_path_are_emitted() -> None:
    """A run of 3 whose second node is NaN: the first node's token and the draw at it are plain decoding's, then the error."""
    executor = spoil(2, lambda rows, plan: rows[2:3], accept_runs([3]))
    engine = make_engine(executor, "dflash")
    got = run_all(engine, requests()[BAD : BAD + 1])["1"]
    assert [len(e.tokens) for e in got] == [1, 4, 2] and got[-1].error == NON_FINITE
    assert tokens_of(got) == expected_tokens(executor.language, requests()[BAD], 512)[:7]


def test_an_end_before_the_bad_row_is_an_end() -> None:
    language = Language()
    language.say(PROMPTS[BAD], [50, 51, EOS, 53, 54])
    executor = ScriptedExecutor(language, guess=accept_runs([4]), bad_rows=lambda step, plan: [plan.m - 1] if step == 1 else [])
    got = run_all(make_engine(executor, "dflash"), [make_request("a", PROMPTS[BAD], max_tokens=9)])["a"]
    assert tokens_of(got) == [50, 51, EOS] and got[-1].finish == "stop" and got[-1].error is None


def test_a_bad_row_off_the_path_is_nobodys_business() -> None:
    """The last node of a wide tree is rejected anyway: plain decoding would never have run it."""
    executor = spoil(4, lambda rows, plan: rows[-1:], accept_runs([1]))
    engine = make_engine(executor, {"tree_budget": 20})
    got = run_all(engine, requests())
    assert all(tokens_of(got[r.id]) == expected_tokens(executor.language, r, 512) for r in requests())
    assert engine.stats().corrupted_requests == 0


def test_a_token_outside_the_vocabulary_is_no_token() -> None:
    executor = ScriptedExecutor()
    step = executor.step
    executor.step = lambda plan: _with_target(step(plan), executor.steps, 97)  # type: ignore[method-assign]
    got = run_all(make_engine(executor), [make_request("a", [5], max_tokens=9, ignore_eos=True)])["a"]
    assert len(tokens_of(got)) == 3 and got[-1].error == NON_FINITE


def _with_target(result: Any, step: int, token: int) -> Any:
    if step == 4:
        result.target[:] = token
    return result


def test_a_stream_that_raises_ends_its_request_alone() -> None:
    class Broken:
        def push(self, tokens: Sequence[int]) -> Any:
            raise UnicodeError("no text")

        def flush(self) -> str:
            raise UnicodeError("no text")

    engine = make_engine(ScriptedExecutor())
    make = engine._make_stream
    engine._make_stream = lambda params: Broken() if params.max_tokens == 7 else make(params)  # type: ignore[assignment,return-value]
    a, b = make_request("a", [5], max_tokens=7), make_request("b", [5], max_tokens=8, ignore_eos=True)
    got = run_all(engine, [a, b])
    assert [(e.finish, e.error, e.tokens) for e in got["a"]] == [("error", STREAM_FAILED, ())]
    assert len(tokens_of(got["b"])) == 8 and engine.dead is None and engine.stats().pages_used == 0
    engine.submit(make_request("c", [5], max_tokens=7))
    engine.abort("c")
    assert [e.finish for e in engine.step()] == ["abort"]


def test_a_listener_that_raises_loses_its_request_and_nothing_else() -> None:
    def listen(emission: Emission) -> None:
        raise RuntimeError("Event loop is closed")

    engine = make_engine(ScriptedExecutor())
    engine.submit(make_request("gone", [5], max_tokens=500, ignore_eos=True), listen)
    got = run_all(engine, [make_request("here", [5], max_tokens=8, ignore_eos=True)])
    assert len(tokens_of(got["here"])) == 8 and engine.dead is None
    stats = engine.stats()
    assert (stats.callback_errors, stats.finished["abort"], stats.running, stats.pages_used) == (2, 1, 0, 0)


def test_a_listener_that_steps_the_engine_is_refused_and_does_not_hang() -> None:
    engine = make_engine(ScriptedExecutor())
    refused: list[str] = []

    def listen(emission: Emission) -> None:
        try:
            engine.step()
        except RuntimeError as error:
            refused.append(str(error))

    engine.submit(make_request("a", [5], max_tokens=2), listen)
    step_until(engine, lambda: not engine._open)
    assert len(refused) == 2 and "from on_emission" in refused[0]


def test_an_abort_that_comes_too_late_does_not_reach_the_next_request_of_its_id() -> None:
    engine = make_engine(ScriptedExecutor())
    first = make_request("a", [5], max_tokens=1)
    got: list[Emission] = []
    engine.submit(first, lambda emission: engine.abort("b"))
    engine.submit(make_request("b", [6], max_tokens=1), got.append)
    engine.step()
    assert [e.finish for e in got] == ["length"], "b ended in the step in which it was aborted"
    engine.submit(make_request("b", [6], max_tokens=1), got.append)
    step_until(engine, lambda: len(got) == 2)
    assert got[1].finish == "length"


@pytest.mark.parametrize("threaded", [True, False])
def test_an_executor_that_dies_ends_everything(threaded: bool) -> None:
    engine = make_engine(ScriptedExecutor(fail_at=4), max_num_seqs=2)
    got: dict[str, list[Emission]] = {r.id: [] for r in requests()}
    for request in requests():
        engine.submit(request, got[request.id].append)
    if threaded:
        engine.start()
        assert engine._thread is not None
        engine._thread.join(10)
        assert not engine._thread.is_alive()
    else:
        for _ in range(5):
            emissions = engine.step()
        assert [e.finish for e in emissions] == ["error"] * 4
    for emissions in got.values():
        assert (emissions[-1].finish, emissions[-1].error) == ("error", ENGINE_FAILED)
        assert [e.finish for e in emissions[:-1]] == [None] * (len(emissions) - 1)
    assert [len(g) for g in got.values()] == [5, 5, 1, 1], "two ran, two waited"
    assert isinstance(engine.dead, RuntimeError) and "scripted failure" in str(engine.dead)
    assert engine.check_health() == f"{ENGINE_FAILED}: RuntimeError"
    with pytest.raises(EngineDead) as caught:
        engine.submit(make_request("late", [5]))
    assert caught.value.__cause__ is engine.dead
    assert engine.shutdown(1.0) and engine.stats().finished["error"] == 4
    if not threaded:
        with pytest.raises(EngineDead):
            engine.step()


def test_an_interrupt_passes_through_and_leaves_a_dead_engine() -> None:
    executor = ScriptedExecutor()

    def interrupted(plan: StepPlan) -> Any:
        raise KeyboardInterrupt

    executor.step = interrupted  # type: ignore[method-assign]
    engine = make_engine(executor)
    got: list[Emission] = []
    engine.submit(make_request("a", [5]), got.append)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert isinstance(engine.dead, KeyboardInterrupt) and [e.finish for e in got] == ["error"]
