"""Sampled text follows the target's distribution, with draft trees as without: chi-square over a vocabulary of 64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.tiny import make_tiny
from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.engine import Engine
from runtime.executor import Executor
from runtime.speculate import NoSpeculation, Speculator, TreeSpeculation
from runtime.stream import TextStream
from runtime.types import Request, SamplingParams
from tests.plans import chain_plan, page_table
from tests.worlds import run

VOCAB = 64
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
DRAWS = 4000
NARROW = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "intermediate_size": 64,
}  # 1/5 of the time
PARAMS = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=3, ignore_eos=True)


class Silent:
    """Token ids matter here, text does not."""

    def push(self, ids: object, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=3, vocab_size=VOCAB, **NARROW)
    return load(path)


def load(path: Path) -> Executor:
    speculative = SpeculativeConfig("ddtree")
    source = loading.open_source(path, speculative)
    config = loading.fit_config(EngineConfig(max_num_batched_tokens=512, num_pages=600, max_model_len=64), source, "float32")
    return loading.make_executor(source, config, speculative, "float32", 1)


def draw_many(executor: Executor, speculator: Speculator, seeds: range) -> tuple[np.ndarray, int]:
    """[len(seeds), 3] tokens after the prompt, and how many drafts were accepted."""
    config = EngineConfig(max_num_batched_tokens=512, max_model_len=64, max_num_queued_reqs=DRAWS)
    engine = Engine(executor, config, lambda params: TextStream(Silent(), params, frozenset()), speculator)
    got = run(engine, [Request(str(seed), PROMPT, PARAMS, seed) for seed in seeds])
    return np.array([got[str(seed)].tokens for seed in seeds]), sum(one.accepted for one in got.values())


def filtered(logits: np.ndarray) -> np.ndarray:
    """Temperature, then the smallest set of mass top_p, written out once more."""
    z = logits.astype(np.float64) / PARAMS.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), PARAMS.top_p) + 1)
    kept = np.zeros(VOCAB)
    kept[order[:count]] = p[order[:count]]
    return kept / kept.sum()


def exact_pairs(executor: Executor) -> np.ndarray:
    """[V, V] probabilities of the first two tokens, from the logits themselves."""
    worker = executor
    model, ops, comm = worker._model, worker._ops, worker._comm  # type: ignore[attr-defined]
    pages = page_table(1, 4)

    def logits_after(tokens: np.ndarray) -> np.ndarray:
        plan = chain_plan(tokens, 0, pages, executor.limits.page_size, [len(tokens) - 1])
        return model.step(ops, comm, plan)[0][0].copy()

    first = filtered(logits_after(PROMPT))
    joint = np.zeros((VOCAB, VOCAB))
    for token in np.flatnonzero(first):
        joint[token] = first[token] * filtered(logits_after(np.append(PROMPT, np.int32(token))))
    return joint


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard normal score of Pearson's statistic; cells expected below 5 are pooled."""
    small = expected < 5
    pooled_counts = np.append(counts[~small], counts[small].sum())
    pooled = np.append(expected[~small], expected[small].sum())
    used = pooled > 0
    statistic = (((pooled_counts - pooled) ** 2)[used] / pooled[used]).sum()
    freedom = used.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def score(tokens: np.ndarray, joint: np.ndarray) -> float:
    counts = np.zeros_like(joint)
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    assert counts[joint == 0].sum() == 0, "a token outside the nucleus was drawn"
    return chi_square(counts.ravel(), joint.ravel() * len(tokens))


def test_pairs_follow_the_target(executor: Executor) -> None:
    joint = exact_pairs(executor)
    plain, _ = draw_many(executor, NoSpeculation(), range(DRAWS))
    tree, accepted = draw_many(executor, TreeSpeculation(executor, SpeculativeConfig(tree_budget=16)), range(DRAWS))
    assert np.array_equal(plain, tree) and accepted > 0.1 * DRAWS
    assert abs(score(tree, joint)) < 4
    warmer = np.where(joint > 0, joint ** (PARAMS.temperature / 1.1), 0)
    assert score(tree, warmer / warmer.sum()) > 4, "a temperature of 1.1 instead of 0.9 must be noticed"
