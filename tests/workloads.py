"""Requests that differ in everything, over a scripted model, and what plain decoding makes of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from runtime.speculate import Root, Taps, Trees
from runtime.stats import EngineStats
from runtime.types import DraftTree, Emission, Request
from tests.language import Language, make_request, mix, path_of
from tests.scripted import ScriptedExecutor, make_engine, run_all, tokens_of

LANGUAGE = Language()
MAX_LEN = 128


class RandomTrees:
    """Trees of any topology, half of whose nodes are right; no drafter behind them."""

    nodes, depth = 24, 9

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        return lambda: [self._tree(root) for root in roots]

    def _tree(self, root: Root) -> DraftTree:
        token, parent, depth, path = [root.token], [-1], [0], [path_of(root.tokens)]
        for _ in range(int(self._rng.integers(root.nodes + 1))):
            above = int(self._rng.integers(max(0, len(token) - 5), len(token)))
            right = self._rng.random() < 0.5
            new = LANGUAGE.likeliest(path[above]) if right else int(self._rng.integers(LANGUAGE.vocab_size))
            if depth[above] == self.depth or any(p == above and t == new for p, t in zip(parent, token, strict=True)):
                continue
            token.append(new)
            parent.append(above)
            depth.append(depth[above] + 1)
            path.append(mix(path[above], new))
        return DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))


def some_requests(count: int = 40, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 60 tokens, half of them behind one of two shared beginnings; every way to sample."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, 97, 30).tolist() for _ in range(2)]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": -0.25},
        {"repetition_penalty": 1.3, "min_tokens": 9},
        {"logprobs": 3, "logit_bias": {5: 2.0, 90: -100.0}},
        {"ignore_eos": True, "stop_token_ids": (2, 3)},
        {"stop": (chr(0x100 + 7), chr(0x100 + 11) + chr(0x100 + 12)), "logprobs": 0},
    ]
    requests = []
    for i in range(count):
        begin = shared[i % 4] if i % 4 < 2 else []
        prompt = [*begin, *rng.integers(0, 97, int(rng.integers(1, 31))).tolist()]
        way = ways[i % len(ways)]
        most = max(int(rng.integers(1, 60)), way.get("min_tokens", 0))
        requests.append(make_request(f"r{i}", prompt, seed=1000 + i, max_tokens=most, **way))
    return requests


REQUESTS = some_requests()


def outcome(emissions: Sequence[Emission]) -> tuple[object, ...]:
    logprobs = [entry for e in emissions for entry in e.logprobs or ()]
    return tokens_of(emissions), "".join(e.text for e in emissions), emissions[-1].finish, emissions[-1].stop_reason, logprobs


def executor(guess: Any = None, **options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(LANGUAGE, **{"guess": guess, "num_pages": 400, "max_positions": MAX_LEN, "max_rows": 64, **options})


@cache
def plain_outcomes() -> dict[str, tuple[object, ...]]:
    """Each request alone, without speculation or prefix cache, its prompt in one chunk."""
    found = {}
    for request in REQUESTS:
        engine = make_engine(executor(num_pages=40, max_rows=128), enable_prefix_caching=False)
        found[request.id] = outcome(run_all(engine, [request])[request.id])
    return found


def steady_requests(count: int = 6, **options: Any) -> list[Request]:
    """Longer and longer prompts, long texts: for most of the time all of them decode, nobody comes and nobody goes."""
    ways: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"temperature": 1.0, "stop_token_ids": (2, 3)},
        {"temperature": 0.7, "frequency_penalty": 0.5, "logprobs": 2},
        {"min_tokens": 30},
    ]
    return [
        make_request(f"s{i}", list(range(3, 5 + 5 * i)), seed=i, max_tokens=50 + 3 * i, **ways[i % len(ways)], **options)
        for i in range(count)
    ]


def alone(requests: Sequence[Request]) -> dict[str, tuple[object, ...]]:
    """What each request gets by itself, plainly."""
    return {r.id: outcome(run_all(make_engine(executor(), enable_prefix_caching=False), [r])[r.id]) for r in requests}


def differing(got: dict[str, list[Emission]]) -> list[str]:
    """Requests whose tokens, text, finish, stop reason or log-probabilities are not those of plain decoding."""
    return [id for id in got if outcome(got[id]) != plain_outcomes()[id]]
