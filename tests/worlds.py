"""Real models behind real engines for tests: executors that are loaded once, engines that are made at will."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from model.tokenizer import Tokenizer
from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.engine import Engine
from runtime.executor import Executor
from runtime.speculate import Root, Speculator, Taps, Trees, make_draft_plan
from runtime.stats import EngineStats
from runtime.stream import TextStream
from runtime.tree import grow
from runtime.types import DraftTree, Emission, Request, SamplingParams, TokenLogprob
from tests.waits import turns

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class World:
    """A loaded model; `engine` makes a fresh engine over it (its pages start empty)."""

    executor: Executor
    config: EngineConfig
    tokenizer: Tokenizer

    def stream(self, params: SamplingParams) -> TextStream:
        return TextStream(self.tokenizer.stream(params.skip_special_tokens), params, self.tokenizer.eos_ids)

    def engine(self, speculator: Speculator, config: EngineConfig | None = None) -> Engine:
        return Engine(self.executor, config or self.config, self.stream, speculator, eos_ids=self.tokenizer.eos_ids)


def load_world(path: str | Path, *, tp: int = 1, method: str = "ddtree", **config: int) -> World:
    speculative = SpeculativeConfig(method=method)
    source = loading.open_source(path, speculative)
    fitted = loading.fit_config(EngineConfig(**{"max_num_batched_tokens": 512, **config}), source, "float32")
    executor = loading.make_executor(source, fitted, speculative, "float32", tp)
    return World(executor, fitted, Tokenizer.load(source.path))


@cache
def demo_world(tp: int = 1) -> World:
    return load_world("demo", tp=tp, max_model_len=1024, num_pages=3000)


@dataclass(slots=True)
class Got:
    """What a request received."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None
    steps: int = 0
    accepted: int = 0

    def add(self, emission: Emission) -> None:
        self.tokens += emission.tokens
        self.text += emission.text
        self.logprobs += emission.logprobs or ()
        self.finish, self.stop_reason = emission.finish, emission.stop_reason
        self.steps += 1
        self.accepted += emission.accepted or 0


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Got]:
    """All requests at once, to their ends."""
    got = {request.id: Got() for request in requests}
    for request in requests:
        engine.submit(request, got[request.id].add)
    for _ in turns(lambda: any(g.finish is None for g in got.values()), "requests without an end"):
        engine.step()
    return got


class BudgetByRequest:
    """DDTree with a budget of its own for every request: 1 to 64, by the number in its id."""

    nodes = 64

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.depth = executor.limits.draft_depth

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        if not roots and not len(taps):
            return list
        logits = self._executor.draft(make_draft_plan(roots, taps))
        if not roots:
            return list
        budgets = [min(1 + int(root.id) % 64, root.nodes) for root in roots]
        return lambda: grow(logits, np.array([root.token for root in roots], np.int32), budgets)


class RandomTrees:
    """Random topologies whose tokens are often, but not always, what plain decoding said next."""

    nodes = 24
    depth = 9

    def __init__(self, plain: Mapping[str, Got], prompts: Mapping[str, int], vocab: int, seed: int = 0) -> None:
        self._plain, self._prompts, self._vocab = plain, prompts, vocab
        self._rng = np.random.default_rng(seed)

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        return lambda: [self._tree(root) for root in roots]

    def _tree(self, root: Root) -> DraftTree:
        rng, done = self._rng, len(root.tokens) - self._prompts[root.id]
        truth = self._plain[root.id].tokens[done:]
        token, parent, depth, right = [root.token], [-1], [0], [True]
        taken: set[tuple[int, int]] = set()
        for _ in range(int(rng.integers(0, min(self.nodes, root.nodes) + 1))):
            above = int(rng.integers(max(0, len(token) - 4), len(token)))  # near the end: deep as well as wide
            level = depth[above]
            if level >= self.depth:
                continue
            hit = right[above] and level < len(truth) and rng.random() < 0.7
            choice = int(truth[level]) if hit else int(rng.integers(0, self._vocab))
            if (above, choice) in taken:
                continue
            taken.add((above, choice))
            token.append(choice)
            parent.append(above)
            depth.append(level + 1)
            right.append(right[above] and level < len(truth) and choice == truth[level])
        return DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))
