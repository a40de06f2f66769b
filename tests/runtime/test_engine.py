"""The engine's surface: what is refused, limits and ends inside accepted runs, aborts, threads, shutdown, health."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.engine import QueueFull
from runtime.scheduler import Scheduler
from runtime.stats import STAGES
from runtime.types import Emission, InvalidRequest, Request, SamplingParams
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
from tests.waits import turns

V = 97


def finishes(emissions: list[Emission]) -> list[str | None]:
    return [e.finish for e in emissions if e.finish is not None]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "at least one token"),
        ([[1, 2]], r"shape \[1, 2\]"),
        ([-1], "-1 at place 0"),
        ([5, V], f"{V} at place 1"),
        ([4294967295], "4294967295"),
        ([2**70], "object"),
        ([1.5], "float64"),
        ([True], "bool"),
        (["a"], "must be integers"),
    ],
)
def test_bad_prompts_are_refused_by_name(prompt: Any, words: str) -> None:
    engine = make_engine(ScriptedExecutor())
    request = Request("x", prompt, SamplingParams(), 0)
    for call in (engine.check, engine.submit):
        with pytest.raises(InvalidRequest, match=words) as caught:
            call(request)
        assert caught.value.field == "prompt"
    assert engine.step() == [] and engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"stop_token_ids": (V,)}, "stop_token_ids"),
        ({"stop_token_ids": (2**31,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"min_tokens": 400, "max_tokens": 500}, "min_tokens"),
    ],
)
def test_bad_parameters_are_refused_by_name(sampling: dict[str, Any], field: str) -> None:
    engine = make_engine(ScriptedExecutor(max_positions=64))
    with pytest.raises(InvalidRequest) as caught:
        engine.check(make_request("x", [1, 2], **sampling))
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="seed"):
        engine.check(make_request("x", [1, 2], seed=2**64))


def test_length_is_bounded_by_context_and_by_pages() -> None:
    by_positions = make_engine(ScriptedExecutor(max_positions=64, num_pages=100))
    by_pages = make_engine(ScriptedExecutor(max_positions=512, num_pages=9))
    by_config = make_engine(ScriptedExecutor(max_positions=512, num_pages=100), max_model_len=50)
    assert (by_positions.max_model_len, by_pages.max_model_len, by_config.max_model_len) == (64, 32, 50)
    for engine in (by_positions, by_pages, by_config):
        most = engine.max_model_len
        with pytest.raises(InvalidRequest, match=f"{most} tokens leave no room"):
            engine.submit(make_request("long", [5] * most))
        ways = enumerate((None, 10**8, 4))
        got = run_all(engine, [make_request(f"{i}", [5] * (most - 6), max_tokens=n, ignore_eos=True) for i, n in ways])
        assert [len(tokens_of(got[i])) for i in "012"] == [6, 6, 4], "clamped to the context that is left"
        assert all(finishes(g) == ["length"] for g in got.values())


def test_one_request_may_take_every_page() -> None:
    engine = make_engine(ScriptedExecutor(num_pages=6, guess=scattered(), max_positions=512), {"tree_budget": 30})
    requests = [make_request(f"{i}", [i + 3], max_tokens=None, ignore_eos=True) for i in range(3)]
    got = run_all(engine, requests)
    assert [len(tokens_of(g)) for g in got.values()] == [19, 19, 19]


def test_ids_of_open_requests_are_taken() -> None:
    engine = make_engine(ScriptedExecutor())
    run_all(engine, [make_request("a", [3], max_tokens=2)])
    engine.submit(make_request("a", [3], max_tokens=2))
    with pytest.raises(InvalidRequest, match="id: 'a'"):
        engine.submit(make_request("a", [3], max_tokens=2))


@pytest.mark.parametrize(
    ("change", "want", "finish", "reason"),
    [
        ({"max_tokens": 5, "stop_token_ids": (33,)}, 3, "stop", 33),  # a stop inside the run and within the cap
        ({"max_tokens": 5, "stop_token_ids": (36,)}, 5, "length", None),  # the cap comes first
        ({"max_tokens": 6, "stop_token_ids": (36,)}, 6, "stop", 36),  # both at one token: the stop
        ({"max_tokens": 50, "stop": (chr(0x100 + 32) + chr(0x100 + 33),)}, 3, "stop", chr(0x100 + 32) + chr(0x100 + 33)),
        ({"max_tokens": 50}, 9, "stop", None),  # EOS in the second run
        ({"max_tokens": 8, "ignore_eos": True}, 8, "length", None),
    ],
)
def test_ends_inside_an_accepted_run(change: dict[str, Any], want: int, finish: str, reason: object) -> None:
    """Tokens 31 … 38, then EOS, in runs of 6: nothing past the end is emitted, counted or given a log-probability."""
    language = Language()
    language.say([5, 6], [31, 32, 33, 34, 35, 36, 37, 38, EOS, 40, 41, 42])
    for speculative in ("dflash", {"tree_budget": 12}, None):
        engine = make_engine(ScriptedExecutor(language, guess=accept_runs([6]), max_positions=64), speculative)
        got = run_all(engine, [make_request("a", [5, 6], logprobs=2, **change)])["a"]
        assert tokens_of(got) == [31, 32, 33, 34, 35, 36, 37, 38, EOS][:want]
        assert (got[-1].finish, got[-1].stop_reason, finishes(got)) == (finish, reason, [finish])
        entries = [entry for e in got for entry in e.logprobs or ()]
        assert [entry.token for entry in entries] == tokens_of(got) and all(len(entry.rank_ids) == 2 for entry in entries)
        assert engine.stats().generation_tokens == want
        assert all((e.accepted or 0) <= len(e.tokens) for e in got)


def test_queue_has_an_end() -> None:
    engine = make_engine(ScriptedExecutor(), max_num_seqs=2, max_num_queued_reqs=3)
    got: list[Emission] = []
    for i in range(5):
        engine.submit(make_request(f"{i}", [7], max_tokens=3, ignore_eos=True), got.append)
    with pytest.raises(QueueFull, match="5 requests run or wait, 5 may"):
        engine.submit(make_request("no", [7]))
    assert (engine.stats().rejected, engine.stats().waiting) == (1, 5)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
    step_until(engine, lambda: len(finishes(got)) >= 1)
    engine.submit(make_request("yes", [7], max_tokens=3), got.append)
    step_until(engine, lambda: len(finishes(got)) == 6)


@pytest.mark.parametrize("speculative", [None, "dflash", {"tree_budget": 12}])
def test_a_thousand_requests_leave_nothing_behind(speculative: Any) -> None:
    """A third is aborted at random points: queued, in a prompt, in a run. The others get every token, and pages == start."""
    rng = np.random.default_rng(5)
    language = Language()
    run = ScriptedExecutor(language, guess=scattered(), num_pages=48, max_rows=48, max_positions=96)
    engine = make_engine(run, speculative, max_num_queued_reqs=10)
    start = engine._scheduler.pool.available
    sizes = rng.integers(1, (30, 14), (1000, 2)).tolist()
    requests = [make_request(f"{i}", rng.integers(0, V, n), max_tokens=most) for i, (n, most) in enumerate(sizes)]
    got: dict[str, list[Emission]] = {}
    aborted: set[str] = set()
    coming = iter(requests)
    request = next(coming)
    for _ in turns(lambda: len(got) < 1000 or any(not finishes(g) for g in got.values()), "requests without an end"):
        while len(got) < 1000:
            try:
                engine.submit(request, got.setdefault(request.id, []).append)
            except QueueFull:
                del got[request.id]
                break
            if rng.random() < 0.1:
                aborted.add(request.id)
            request = next(coming, request)
        aborted |= {id for id, g in got.items() if not finishes(g) and rng.random() < 0.03}
        for id in aborted:
            engine.abort(id)
        engine.step()
        engine._scheduler.check()
    assert len(aborted) > 200
    for request in requests:
        want, emissions = expected_tokens(language, request, 96, [EOS]), got[request.id]
        tokens, [finish] = tokens_of(emissions), finishes(emissions)
        assert tokens == want[: len(tokens)]
        assert finish == "abort" and request.id in aborted if len(tokens) < len(want) else finish in ("stop", "length", "abort")
    stats = engine.stats()
    assert (engine._scheduler.pool.available, stats.pages_used, stats.running, stats.waiting) == (start, 0, 0, 0)
    assert sum(stats.finished.values()) == 1000 and stats.finished["error"] == 0
    assert not engine._open and not engine._inbox and not engine._aborts


def test_mutation_aborted_pages_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(self: Scheduler, sequence: Any) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    monkeypatch.setattr(Scheduler, "remove", remove)
    with pytest.raises(AssertionError, match="holders"):
        run_all(make_engine(ScriptedExecutor()), [make_request("a", [3], max_tokens=2)])


def test_abort_comes_before_the_next_step() -> None:
    engine = make_engine(ScriptedExecutor(max_rows=8), max_num_seqs=1)
    got: dict[str, list[Emission]] = {name: [] for name in "abc"}
    for name in "abc":
        engine.submit(make_request(name, [9] * 20, max_tokens=30, ignore_eos=True), got[name].append)
    engine.abort("c")  # before it was ever taken in
    engine.step()
    assert [e.finish for e in got["c"]] == ["abort"]
    engine.abort("a")  # in its prompt
    engine.abort("a")
    engine.abort("unknown")
    engine.step()
    assert [(e.finish, e.tokens) for e in got["a"]] == [("abort", ())] and engine.stats().running == 1
    step_until(engine, lambda: len(got["b"]) == 5)
    engine.abort("b")
    [last] = engine.step()
    assert (last.id, last.finish) == ("b", "abort") and not engine._open
    assert engine.step() == [] and engine.stats().pages_used == 0
    assert engine.stats().finished == {"stop": 0, "length": 0, "abort": 3, "error": 0}


def test_an_aborted_request_releases_the_text_it_held_back() -> None:
    language = Language()
    language.say([5], [31, 32, 33])
    engine = make_engine(ScriptedExecutor(language))
    got: list[Emission] = []
    engine.submit(make_request("a", [5], stop=(chr(0x100 + 32) + "!",)), got.append)
    step_until(engine, lambda: len(got) == 2)
    engine.abort("a")
    engine.step()
    assert [e.text for e in got] == [chr(0x100 + 31), "", chr(0x100 + 32)]


def test_executor_and_config_must_agree() -> None:
    run = ScriptedExecutor(num_pages=20, page_size=4, max_rows=32)
    for name, value in (("block_size", 16), ("num_pages", 21), ("max_num_batched_tokens", 33)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            make_engine(run, **{name: value})
    assert make_engine(run, num_pages=10).stats().pages_total == 9


def test_stats_tell_the_stages() -> None:
    engine = make_engine(ScriptedExecutor(guess=accept_runs([2, 0]), delay_s=0.001), "dflash", buckets=(8, 64, 256))
    run_all(engine, [make_request("a", [4, 5], max_tokens=12, ignore_eos=True)])
    stats = engine.stats()
    assert tuple(stats.stage_s) == STAGES and all(seconds > 0 for seconds in stats.stage_s.values())
    assert stats.stage_s["verify"] >= 0.001 * stats.steps and stats.step_ms_ema >= 1
    assert stats.bucket_steps == {8: stats.steps}
    # The prompt's token; runs of 2 and 0 with a bonus each: 3 + 1 + 3 + 1 + 3 = 11 more, in 5 steps.
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps, stats.drafts) == (2, 12, 6, 5)
    assert stats.accepted_per_position == [3, 3] and stats.rows == 2 + stats.drafts + stats.draft_tokens
    stats.finished["stop"] = 99
    assert engine.stats().finished["stop"] == 0, "a copy"


def test_waiting_prompts_have_an_end_in_tokens() -> None:
    engine = make_engine(ScriptedExecutor(), max_num_seqs=1, max_num_queued_tokens=10)
    engine.submit(make_request("long", [3] * 40, max_tokens=20, ignore_eos=True))
    with pytest.raises(QueueFull, match="40 prompt tokens wait, and 1 more are above the limit of 10"):
        engine.submit(make_request("a", [3], max_tokens=2))
    engine.step()
    for name, size in (("b", 6), ("c", 4)):
        engine.submit(make_request(name, [4] * size, max_tokens=2))
    with pytest.raises(QueueFull, match="10 prompt tokens wait, and 1 more"):
        engine.submit(make_request("d", [3], max_tokens=2))
    assert engine.stats().rejected == 2
    step_until(engine, lambda: not engine._open)
    engine.submit(make_request("e", [3], max_tokens=2))
