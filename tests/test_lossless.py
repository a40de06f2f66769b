"""Speculation never changes a text: the demo model, every method, every way to sample; more than 500 prompts at level 2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from model.chat_template import ChatTemplate
from runtime import cycle
from runtime.config import SpeculativeConfig
from runtime.env import load_env
from runtime.speculate import NoSpeculation, Speculator, TreeSpeculation
from runtime.types import DraftTree, Request, SamplingParams
from runtime.verdicts import Verdict, judge
from tests.worlds import ROOT, BudgetByRequest, Got, RandomTrees, World, demo_world, run

# 100 prompts and three methods take 35 s of a core; 64 is the least that gives every tree budget from 1 to 64 its turn.
COUNT = {"greedy": 520, "nucleus": 180, "penalties": 180} if load_env().test_level > 1 else {"greedy": 128, "nucleus": 64, "penalties": 64}
TOKENS = 10
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=TOKENS),
    "penalties": SamplingParams(
        temperature=0.7,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        repetition_penalty=1.15,
        logit_bias={32: 1.5, 10: -2.0},
        min_tokens=6,
        max_tokens=TOKENS,
    ),
}


@pytest.fixture(scope="module")
def world() -> World:
    return demo_world()


@pytest.fixture(scope="module")
def prompts(world: World) -> list[list[int]]:
    """Questions in the chat format, beginnings of their answers as plain text, in turn; short ones, for the time they take."""
    held_out = json.loads((ROOT / "tests" / "fixtures" / "heldout_prompts.json").read_text(encoding="utf-8"))
    template = ChatTemplate.load(ROOT / "model" / "demo", world.tokenizer)
    chats = [template.encode([{"role": "user", "content": item["q"]}], thinking=False) for item in held_out]
    texts = [world.tokenizer.encode(item["a"])[:24] for item in held_out]
    return [prompt for pair in zip(sorted(chats, key=len), texts, strict=True) for prompt in pair][: max(COUNT.values())]


def requests_for(prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    return [Request(str(i), np.array(p, np.int32), params, seed=1000 + i) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(world: World, prompts: list[list[int]]) -> dict[str, dict[str, Got]]:
    return {name: run(world.engine(NoSpeculation()), requests_for(prompts[: COUNT[name]], params)) for name, params in SAMPLING.items()}


def speculators(world: World, prompts: list[list[int]], plain: dict[str, Got]) -> dict[str, Speculator]:
    return {
        "chain": TreeSpeculation(world.executor, SpeculativeConfig(method="dflash")),
        "ddtree": BudgetByRequest(world.executor),
        "random": RandomTrees(plain, {str(i): len(p) for i, p in enumerate(prompts)}, world.executor.limits.vocab_size),
    }


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", ["chain", "ddtree", "random"])
def test_text_equals_plain_decoding(
    world: World, prompts: list[list[int]], plain: dict[str, dict[str, Got]], method: str, sampling: str
) -> None:
    want, some = plain[sampling], prompts[: COUNT[sampling]]
    assert len(want) == len(some) == COUNT[sampling]
    got = run(world.engine(speculators(world, some, want)[method]), requests_for(some, SAMPLING[sampling]))
    different = [i for i in want if (got[i].tokens, got[i].text, got[i].finish) != (want[i].tokens, want[i].text, want[i].finish)]
    assert not different
    assert [g.logprobs for g in got.values()] == [g.logprobs for g in want.values()]
    accepted = sum(g.accepted for g in got.values())
    assert accepted > 0.1 * sum(len(g.tokens) for g in want.values()), "drafts must be accepted, or this test shows nothing"


def test_mutation_wrong_walk_is_noticed(
    world: World, prompts: list[list[int]], plain: dict[str, dict[str, Got]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepting a node whose token the target did not draw changes texts."""

    def always_the_first_child(trees: Sequence[DraftTree], target: np.ndarray, sound: np.ndarray) -> list[Verdict]:
        lied, root = target.copy(), 0
        for tree in trees:
            if len(tree) > 1:
                lied[root] = tree.token[1]
            root += len(tree)
        return judge(trees, lied, sound)

    monkeypatch.setattr(cycle, "judge", always_the_first_child)
    some = prompts[:12]
    got = run(world.engine(BudgetByRequest(world.executor)), requests_for(some, SAMPLING["greedy"]))
    assert any(got[str(i)].tokens != plain["greedy"][str(i)].tokens for i in range(12))


def test_batch_of_eight_equals_each_alone(world: World, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=16, logprobs=2)
    requests = requests_for(prompts[:8], params)
    spec = lambda: TreeSpeculation(world.executor, SpeculativeConfig(tree_budget=12))  # noqa: E731
    together = run(world.engine(spec()), requests)
    for request in requests:
        alone = run(world.engine(spec()), [request])[request.id]
        mine = together[request.id]
        assert (alone.tokens, alone.text, alone.logprobs) == (mine.tokens, mine.text, mine.logprobs)


def test_few_pages_small_chunks_and_prefix_hits_change_nothing(world: World, prompts: list[list[int]]) -> None:
    """Preemption, chunks of 24 rows and shared prefixes: still the same text."""
    some = [prompts[-1 - i // 2] for i in range(16)]  # each twice, one after the other
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=56)
    requests = [Request(str(i), np.array(p, np.int32), params, seed=1000 + i // 2) for i, p in enumerate(some)]
    want = run(world.engine(NoSpeculation()), requests[::2])
    tight = world.config.replace(num_pages=20, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=256)
    engine = world.engine(TreeSpeculation(world.executor, SpeculativeConfig(tree_budget=8)), tight)
    got = run(engine, requests)
    assert [got[str(i)].tokens for i in range(16)] == [want[str(i - i % 2)].tokens for i in range(16)]
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0, "the tight engine must have been under pressure"
    assert stats.pages_used == 0


def test_ends_inside_an_accepted_run(world: World, prompts: list[list[int]]) -> None:
    """EOS, stop strings, stop tokens and max_tokens cut where plain decoding cuts; log-probabilities and counts agree."""
    base = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    long = run(world.engine(NoSpeculation()), requests_for(prompts[:30], base))
    requests = []
    for i in range(30):
        text, tokens = long[str(i)].text, long[str(i)].tokens
        changes = ({"stop": (text[7:10],)} if len(text) > 12 else {}, {"stop_token_ids": tokens[6:7]}, {"max_tokens": 1 + i % 9}, {})[i % 4]
        requests.append(Request(str(i), np.array(prompts[i], np.int32), replace(base, **changes), seed=i))
    want = run(world.engine(NoSpeculation()), requests)
    for spec in (SpeculativeConfig(method="dflash"), SpeculativeConfig(tree_budget=32)):
        got = run(world.engine(TreeSpeculation(world.executor, spec)), requests)
        for i in want:
            assert (got[i].tokens, got[i].text, got[i].finish, got[i].stop_reason) == (
                want[i].tokens,
                want[i].text,
                want[i].finish,
                want[i].stop_reason,
            )
            assert got[i].logprobs == want[i].logprobs and len(got[i].logprobs) == len(got[i].tokens)
    assert {"stop", "length"} <= {g.finish for g in want.values()}


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_text_equals_one_rank(world: World, prompts: list[list[int]], tp: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    requests = requests_for(prompts[:6], params)
    one = run(world.engine(NoSpeculation()), requests)
    ranks = demo_world(tp)
    many = run(ranks.engine(TreeSpeculation(ranks.executor, SpeculativeConfig(tree_budget=8))), requests)
    assert [g.tokens for g in many.values()] == [g.tokens for g in one.values()]
    filters = replace(SAMPLING["penalties"], temperature=1.2, top_p=0.9, top_k=30, min_p=0.01, logprobs=3)
    for seeded in (SAMPLING["nucleus"], SAMPLING["penalties"], filters)[tp - 2 :]:
        requests = requests_for(prompts[:6], seeded)
        two, one = (run(each.engine(NoSpeculation()), requests) for each in (ranks, world))
        assert [g.tokens for g in two.values()] == [g.tokens for g in one.values()]
    for mine, theirs in zip(two.values(), one.values(), strict=True):
        assert [p.rank_ids for p in mine.logprobs] == [p.rank_ids for p in theirs.logprobs]
        values, wanted = (np.array([(p.logprob, *p.rank_logprobs) for p in got.logprobs]) for got in (mine, theirs))
        assert np.abs(values - wanted).max() < 1e-4
