"""Steps over a scripted model: speculation, chunks, preemption and shared prefixes leave every token where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scripted import EOS, accept_runs, expected_tokens, make_engine, make_request, run_all, scattered, tokens_of
from tests.workloads import LANGUAGE, MAX_LEN, REQUESTS, RandomTrees, differing, executor, plain_outcomes


def test_plain_decoding_is_what_the_language_says() -> None:
    plain = plain_outcomes()
    simple = [r for r in REQUESTS if not (r.sampling.has_penalties or r.sampling.logit_bias or r.sampling.stop)]
    assert len(simple) > 10
    for request in simple:
        assert plain[request.id][0] == expected_tokens(LANGUAGE, request, MAX_LEN, [EOS])
    assert {finish for _, _, finish, *_ in plain.values()} == {"stop", "length"}


METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"guess": None},
    "chain": lambda: {"guess": accept_runs([4, 1, 7, 0, 2]), "speculative": "dflash"},
    "short chain": lambda: {"guess": accept_runs([3]), "speculative": {"method": "dflash", "num_speculative_tokens": 3}},
    "tree of 1": lambda: {"guess": scattered(1), "speculative": {"tree_budget": 1}},
    "tree of 8": lambda: {"guess": scattered(2), "speculative": {"tree_budget": 8}},
    "tree of 60": lambda: {"guess": scattered(3), "speculative": {"tree_budget": 60, "draft_top_k": 3}},
    "random trees": lambda: {"guess": scattered(4), "speculator": RandomTrees()},
}
PRESSURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "roomy": ({}, {}),
    "few pages": ({"num_pages": 36}, {}),
    "few rows": ({"max_rows": 20}, {"max_num_seqs": 12}),
    "few of both, no cache": ({"num_pages": 34, "max_rows": 17}, {"max_num_seqs": 16, "enable_prefix_caching": False}),
    "buckets, pages of one": ({"page_size": 1, "num_pages": 500}, {"buckets": (1, 2, 4, 8, 16, 32, 64)}),
    "big pages": ({"page_size": 64, "num_pages": 9}, {}),
}


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(method: str, pressure: str) -> None:
    built, config = PRESSURES[pressure]
    chosen = METHODS[method]()
    run = executor(chosen.pop("guess"), **built)
    engine = make_engine(run, **{**config, **chosen})
    got = run_all(engine, REQUESTS)
    assert not differing(got)
    stats = engine.stats()
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.generation_tokens == sum(len(p[0]) for p in plain_outcomes().values())
    if method != "none":
        assert stats.accepted_tokens > 0.1 * stats.generation_tokens, "drafts must be accepted, or this test shows nothing"
        assert stats.accepted_tokens == sum(stats.accepted_per_position) == sum(e.accepted or 0 for g in got.values() for e in g)
        assert stats.draft_tokens == sum(e.drafted for g in got.values() for e in g) >= stats.accepted_tokens
    if pressure.startswith("few") and "num_pages" in built:
        assert stats.preemptions > 0
    if "enable_prefix_caching" not in config:
        assert stats.prefix_hits > 0 or built.get("page_size") == 64
    assert sum(stats.bucket_steps.values()) == stats.steps == run.steps
    assert {plan.bucket for plan in run.plans} <= set(config.get("buckets", range(65)))


def test_exact_runs_are_accepted() -> None:
    """A drafter that is right for 4, 1, 7 tokens: 4, 1, 7 are accepted, and a bonus token is emitted with each."""
    request = make_request("a", [3, 4, 5], max_tokens=40, ignore_eos=True)
    for speculative in ("dflash", {"tree_budget": 7}):
        engine = make_engine(executor(accept_runs([4, 1, 7])), speculative)
        got = run_all(engine, [request])["a"]
        assert [e.accepted for e in got[:7]] == [None, 4, 1, 7, 4, 1, 7]
        assert [len(e.tokens) for e in got[:7]] == [1, 5, 2, 8, 5, 2, 8]


def test_every_draft_stays_within_what_is_left() -> None:
    """Neither tokens left to emit nor the context's end is drafted past: no node could be emitted there."""
    run = executor(accept_runs([7]), num_pages=100, max_positions=32)
    engine = make_engine(run, {"tree_budget": 60})
    got = run_all(engine, [make_request("a", range(2, 12), max_tokens=None, ignore_eos=True), make_request("b", [5], max_tokens=3)])
    assert len(tokens_of(got["a"])) == 22 and got["a"][-1].finish == "length"
    assert max(int(plan.pos.max()) for plan in run.plans) < 31
    drafted = [e.drafted for e in got["b"]]
    assert drafted[0] == 0 and len(tokens_of(got["b"])) == 3
    depths = [int(plan.pos[plan.seq == b].max() - plan.ctx[b]) for plan in run.plans for b in range(len(plan.ctx)) if plan.ctx[b] in (1, 2)]
    assert max(depths[1:], default=0) <= 1
