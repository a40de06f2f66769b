"""Shared prefixes: equal tokens, drafts as good as without a hit, nothing shared across salts or unfinished work."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.types import Emission, Request
from tests.scripted import EOS, Language, ScriptedExecutor, accept_runs, expected_tokens, make_engine, make_request, run_all, tokens_of
from tests.waits import turns

LANGUAGE = Language()
PREFIX = list(range(30, 70))  # 40 tokens, 10 pages of 4


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(LANGUAGE, **{"guess": accept_runs([3, 2, 5]), "num_pages": 200, **options})


def cached(emissions: list[Emission]) -> int:
    assert len({e.cached_tokens for e in emissions}) == 1
    return emissions[0].cached_tokens


def check_tokens(got: dict[str, list[Emission]], requests: list[Request]) -> None:
    for request in requests:
        assert tokens_of(got[request.id]) == expected_tokens(LANGUAGE, request, 512, [EOS])


@pytest.mark.parametrize("speculative", [None, "dflash", {"tree_budget": 20}])
def test_a_hit_gives_the_same_tokens_and_equally_good_drafts(speculative: Any) -> None:
    """The second time the drafter finds its own context in the shared pages: runs are those of the first time."""
    engines = [make_engine(executor(), speculative, enable_prefix_caching=on) for on in (False, True)]
    runs = []
    for engine in engines:
        for name in ("first", "second"):
            request = make_request(name, [*PREFIX, 5], max_tokens=31, ignore_eos=True)
            engine._cycle._executor.guess = accept_runs([3, 2, 5])
            got = run_all(engine, [request])
            check_tokens(got, [request])
            runs.append([e.accepted for e in got[name]])
            assert cached(got[name]) == (40 if engine is engines[1] and name == "second" else 0)
    assert runs[0] == runs[1] == runs[2]
    assert runs[3] == runs[0], "the same steps, although 40 tokens were found"
    assert engines[1].stats().prefix_hits == 40 and engines[1].stats().prefix_queries == 82
    assert engines[0].stats().prefix_queries == 0


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (40, 36), (41, 40)])
def test_full_pages_are_found_but_never_the_newest_token(length: int, found: int) -> None:
    engine = make_engine(executor(), "dflash")
    run_all(engine, [make_request("a", PREFIX, max_tokens=3)])
    request = make_request("b", [*PREFIX, 5][:length], max_tokens=20)
    got = run_all(engine, [request])
    assert cached(got["b"]) == found
    check_tokens(got, [request])


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    engine = make_engine(executor(), {"tree_budget": 9})
    first = make_request("a", PREFIX[:6], max_tokens=25, ignore_eos=True)
    answer = tokens_of(run_all(engine, [first])["a"])
    turn = make_request("b", [*PREFIX[:6], *answer, 9, 9], max_tokens=10)
    got = run_all(engine, [turn])
    assert cached(got["b"]) == 28, "31 tokens less the last, whose K/V was never computed: 7 pages of 4"
    check_tokens(got, [turn])


def test_tokens_past_the_end_are_not_kept() -> None:
    """A run goes past EOS: what came after it is in nobody's prefix."""
    language = Language()
    answer = [31, 32, 33, EOS, 35, 36, 37, 38, 39, 40]
    language.say([5, 6, 7], answer)
    engine = make_engine(ScriptedExecutor(language, guess=accept_runs([7])), "dflash")
    first = run_all(engine, [make_request("a", [5, 6, 7], max_tokens=30)])["a"]
    assert tokens_of(first) == [31, 32, 33, EOS]
    got = run_all(engine, [make_request("b", [5, 6, 7, *answer], max_tokens=4)])
    assert cached(got["b"]) == 4, "3 + 4 tokens and no more were the conversation's"


def test_salts_and_beginnings_part_requests() -> None:
    engine = make_engine(executor(), "dflash")
    run_all(engine, [make_request("a", PREFIX, max_tokens=3, cache_salt=b"one")])
    others = [
        make_request("salt", PREFIX, max_tokens=9, cache_salt=b"two"),
        make_request("none", PREFIX, max_tokens=9),
        make_request("other", [1, *PREFIX[1:]], max_tokens=9, cache_salt=b"one"),
        make_request("same", PREFIX, max_tokens=9, cache_salt=b"one"),
    ]
    got = run_all(engine, others)
    assert [cached(got[r.id]) for r in others] == [0, 0, 0, 36]
    check_tokens(got, others)


def test_requests_side_by_side_share_what_the_first_has_finished() -> None:
    engine = make_engine(executor(), {"tree_budget": 6})
    requests = [make_request(f"{i}", [*PREFIX, i], max_tokens=12) for i in range(6)]
    got: dict[str, list[Emission]] = {r.id: [] for r in requests}
    engine.submit(requests[0], got["0"].append)
    engine.step()
    for request in requests[1:]:
        engine.submit(request, got[request.id].append)
    for _ in turns(lambda: not all(g and g[-1].finish for g in got.values()), "requests without an end"):
        engine.step()
        engine._scheduler.check()
    assert [cached(got[r.id]) for r in requests] == [0, 40, 40, 40, 40, 40]
    check_tokens(got, requests)


def test_eviction_takes_the_longest_unused_from_its_far_end() -> None:
    """23 pages, prompts of 9, each with a tenth for the second token.

    a and b leave 18 kept, 5 free. a finds 8 of its 9, as its last token is computed again. c takes the 5
    free ones, a's unused ninth and b's last 4. a's third run needs 2 beside the 8 it finds: the one free
    and one more of b, which thus finds 4 of its 9.
    """
    engine = make_engine(executor(num_pages=24), None, max_num_seqs=1)
    prompts = {name: [i, *PREFIX[:35]] for i, name in enumerate("abc")}
    found = [cached(run_all(engine, [make_request(name, prompts[name], max_tokens=2, ignore_eos=True)])[name]) for name in "abacab"]
    assert found == [0, 0, 32, 0, 32, 16]
