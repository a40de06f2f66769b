"""batch_invariant over the CPU shim: a generation with draft trees is plain decoding's bit for bit, tokens and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

import runtime.cuda_worker as cuda_worker
from runtime.kernels_cu import record_attention
from runtime.kernels_cu.tree_paths import PathPages
from runtime.speculate import NoSpeculation
from runtime.types import Request, SamplingParams
from tests.plans import make_plan, page_table
from tests.runtime.graph.worlds import PAGE, VOCAB, Pair, bits_of, tiny_model
from tests.worlds import Got, RandomTrees, run

ROWS, TOKENS = 12, 9
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=2, repetition_penalty=1.2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, max_tokens=TOKENS, logprobs=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def make(path, shim, paths: PathPages | None) -> Pair:
    """Where every tile of keys is a range of its own: an order of sums that positions decide."""
    usual, record_attention._LEAST_TILES = record_attention._LEAST_TILES, 1
    try:
        return Pair(path, shim, rows=ROWS, sizes=(1, ROWS), length=112, invariant=True, paths=paths)
    finally:
        record_attention._LEAST_TILES = usual


@pytest.fixture(scope="module")
def pair(path, shim) -> Pair:
    return make(path, shim, PathPages(ROWS, RandomTrees.depth, PAGE))


def requests_for(params: SamplingParams) -> list[Request]:
    """Prompts whose ends lie before the end of a page, of a tile of 64 keys, and of neither."""
    rng = np.random.default_rng(4)
    return [Request(str(i), rng.integers(3, VOCAB, n).astype(np.int32), params, seed=5 + i) for i, n in enumerate((13, 60))]


def generate(pair: Pair, params: SamplingParams) -> tuple[dict[str, Got], dict[str, Got]]:
    """(plain, with random trees that are often right)."""
    requests = requests_for(params)
    plain = run(pair.engine(pair.cuda, NoSpeculation()), requests)
    trees = RandomTrees(plain, {r.id: len(r.prompt) for r in requests}, VOCAB)
    return plain, run(pair.engine(pair.cuda, trees), requests)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_trees_change_no_bit_of_a_generation(pair, sampling):
    plain, drafted = generate(pair, SAMPLING[sampling])
    assert bits_of(drafted) == bits_of(plain)
    assert sum(got.accepted for got in drafted.values()) >= 4


def test_mutation_without_private_pages_bits_differ(path, shim, monkeypatch):
    monkeypatch.setattr(cuda_worker, "check_plan", lambda plan, paths: None)
    plain, drafted = generate(make(path, shim, None), SAMPLING["greedy"])
    assert bits_of(drafted) != bits_of(plain)


def test_trees_without_private_pages_are_refused(path, shim):
    pair = make(path, shim, None)
    pages = page_table(1, 2)
    with pytest.raises(ValueError, match="this executor verifies chains only"):
        pair.cuda.step(make_plan([[3, 4, 5]], [[-1, 0, 0]], [0], pages))
    assert pair.cuda.step(make_plan([[3, 4, 5]], [[-1, 0, 1]], [0], pages)).finite.all()
