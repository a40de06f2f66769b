"""The engine in its own thread: clients from many threads, idleness, shutdown, health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from runtime.engine import ShuttingDown
from runtime.types import Emission
from tests.scripted import EOS, Language, ScriptedExecutor, expected_tokens, make_engine, make_request, scattered, tokens_of
from tests.waits import join, turns


def finishes(emissions: list[Emission]) -> list[str | None]:
    return [e.finish for e in emissions if e.finish is not None]


def _wait_for(done: Callable[[], bool], most_s: float = 10.0) -> None:
    end = time.monotonic() + most_s
    while not done():
        if time.monotonic() > end:
            raise AssertionError(f"not within {most_s} s")
        time.sleep(0.002)


def test_threads_submit_and_abort_while_it_runs() -> None:
    language = Language()
    engine = make_engine(ScriptedExecutor(language, guess=scattered(), num_pages=200), "ddtree", max_num_queued_reqs=1000)
    engine.start()
    with pytest.raises(RuntimeError, match="own thread"):
        engine.step()
    got: dict[str, list[Emission]] = {}
    callers: set[int] = set()
    requests = [make_request(f"{t}-{i}", [t, i, 5], max_tokens=20) for t in range(4) for i in range(15)]

    def client(t: int) -> None:
        for request in requests[t * 15 : t * 15 + 15]:
            mine = got.setdefault(request.id, [])

            def listen(emission: Emission, mine: list[Emission] = mine) -> None:
                callers.add(threading.get_ident())
                mine.append(emission)

            engine.submit(request, listen)
            if request.id.endswith("3"):
                engine.abort(request.id)
            engine.stats()

    threads = [threading.Thread(target=client, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert engine.shutdown(20)
    assert len(callers) == 1 and threading.get_ident() not in callers
    for request in requests:
        want, tokens = expected_tokens(language, request, 512, [EOS]), tokens_of(got[request.id])
        [finish] = finishes(got[request.id])
        assert tokens == want or (finish == "abort" and tokens == want[: len(tokens)])
    assert engine.stats().finished["abort"] >= 1 and engine.stats().pages_used == 0
    with pytest.raises(ShuttingDown):
        engine.submit(make_request("late", [3]))


def test_an_idle_engine_sleeps() -> None:
    engine = make_engine(ScriptedExecutor())
    engine.start()
    got: list[Emission] = []
    engine.submit(make_request("a", [3], max_tokens=2), got.append)
    _wait_for(lambda: bool(finishes(got)))
    assert engine._thread is not None and engine._thread.ident is not None
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    time.sleep(0.1)  # what follows a last step
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.03
    assert engine.check_health() is None
    assert engine.shutdown(5) and not engine._thread.is_alive()


@pytest.mark.parametrize("threaded", [True, False])
def test_shutdown_drains_then_aborts(threaded: bool) -> None:
    """Six long requests: with time they end by themselves, without it they are aborted; both leave nothing open."""
    for timeout_s, want in ((20.0, {"length"}), (0.0, {"abort"})):
        engine = make_engine(ScriptedExecutor(delay_s=0.002), max_num_seqs=4)
        got: dict[str, list[Emission]] = {f"{i}": [] for i in range(6)}
        for name, mine in got.items():
            engine.submit(make_request(name, [8], max_tokens=40, ignore_eos=True), mine.append)
        if threaded:
            engine.start()
            _wait_for(lambda got=got: bool(got["0"]))
        else:
            engine.step()
        assert engine.shutdown(timeout_s)
        assert {finish for g in got.values() for finish in finishes(g)} == want and all(finishes(g) for g in got.values())
        assert engine.stats().pages_used == 0


def test_a_second_shutdown_ends_a_patient_first_one() -> None:
    engine = make_engine(ScriptedExecutor(delay_s=0.01))
    got: list[Emission] = []
    engine.submit(make_request("a", [8], max_tokens=400, ignore_eos=True), got.append)
    engine.start()
    first = threading.Thread(target=engine.shutdown, args=(60.0,))
    first.start()
    started = time.monotonic()
    assert engine.shutdown(0.0)
    first.join(30)
    assert not first.is_alive() and time.monotonic() - started < 30 and finishes(got) == ["abort"]


def test_a_hanging_step_is_reported() -> None:
    engine = make_engine(ScriptedExecutor(delay_s=0.6), step_deadline_s=0.1)
    engine.submit(make_request("a", [8], max_tokens=2))
    engine.start()
    assert engine.check_health() is None
    _wait_for(lambda: engine.check_health() is not None)
    assert "no step has finished" in str(engine.check_health()) and "1 requests are open" in str(engine.check_health())
    assert not engine.shutdown(0.0), "the step does not come back in time"
    assert engine._thread is not None
    engine._thread.join(5)
    assert not engine._open


def test_steps_without_progress_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is preempted after every chunk computes the same positions for ever: steps finish, nothing moves."""
    executor = ScriptedExecutor(delay_s=0.005, max_rows=16)
    engine = make_engine(executor, step_deadline_s=0.2, enable_prefix_caching=False)
    run = engine._cycle.run

    def thrash(meanwhile: Callable[[], object]) -> None:
        run(meanwhile)
        for sequence in list(engine._scheduler.running):
            engine._scheduler.preempt(sequence)

    monkeypatch.setattr(engine._cycle, "run", thrash)
    engine.submit(make_request("a", list(range(2, 42)), max_tokens=2))
    engine.start()
    _wait_for(lambda: "steps finish without any progress" in str(engine.check_health()))
    said = str(engine.check_health())
    assert "limit 0.2 s" in said and "1 requests are open" in said
    assert engine.stats().steps > 5 and engine.stats().progress == 16, "the steps went on, over the same 16 positions"
    assert engine.shutdown(0.0)


def test_a_long_prompt_is_progress() -> None:
    """80 chunks of 20 ms are longer than the deadline, and every one of them moves something."""
    engine = make_engine(ScriptedExecutor(delay_s=0.02, max_rows=16, num_pages=512, max_positions=2048), step_deadline_s=1.0)
    got: list[Emission] = []
    engine.submit(make_request("a", [2 + i % 40 for i in range(1280)], max_tokens=2, ignore_eos=True), got.append)
    engine.start()
    began, ill = time.monotonic(), []
    for _ in turns(lambda: not finishes(got), "a prompt that is not read"):
        ill.append(engine.check_health())
        time.sleep(0.002)
    assert time.monotonic() - began > 1.2 and not any(ill)
    assert engine.shutdown(1.0)
