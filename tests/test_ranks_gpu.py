"""Two GPU ranks: every element of every sum, and the demo model's texts against one rank's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
GAP = 0.06  # of two log-probabilities; sums of bfloat16 parts in another order move logits by some hundredths
PROMPTS = ["def add(a, b):", "The capital of France is", "import numpy as np\n", "Once upon a time", "x = [1, 2, 3]\nfor", "class Stack:"]
pytestmark = pytest.mark.multi_gpu


def test_every_sum_is_right() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_allreduce.py"), "--rows", "1", "3", "8", "64", "128", "200", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def test_ranks_draw_from_shares_what_one_draws() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_draw_ranks.py"), "--rows", "1", "70", "200", "--product-rows", "1", "100", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.parametrize("eager", [False, True])
def test_texts_are_those_of_one_rank(eager: bool) -> None:
    """All ranks' tokens are compared at every step by the executor itself; against one rank, texts may part at near ties alone."""
    options: dict[str, Any] = {"backend": "cuda", "max_model_len": 512, "enforce_eager": eager, "speculative_config": "none"}
    greedy = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2)
    seeded = SamplingParams(temperature=0.8, seed=11, max_tokens=48, logprobs=2)
    params = [greedy if i % 2 else seeded for i in range(len(PROMPTS))]
    one = [output.outputs[0] for output in LLM("demo", **options).generate(PROMPTS, params)]
    llm = LLM("demo", tensor_parallel_size=2, **options)
    two = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    equal = 0
    for mine, want, how in zip(two, one, params, strict=True):
        place = next((i for i, pair in enumerate(zip(mine.token_ids, want.token_ids, strict=False)) if pair[0] != pair[1]), None)
        equal += len(want.token_ids) if place is None else place
        if place is not None and how is greedy:
            assert want.logprobs is not None
            best, second = want.logprobs[place].rank_logprobs
            assert best - second < GAP, f"token {place}: {mine.token_ids[place]} for {want.token_ids[place]}, led by {best - second:.3f}"
    print(f"\n{equal} of {sum(len(o.token_ids) for o in one)} tokens before texts part")
    assert equal > 0.5 * sum(len(o.token_ids) for o in one)


def test_drafts_do_not_change_the_texts_of_two_ranks() -> None:
    options: dict[str, Any] = {"backend": "cuda", "max_model_len": 512, "tensor_parallel_size": 2}
    greedy = SamplingParams(temperature=0.0, max_tokens=48)
    plain = [output.outputs[0].token_ids for output in LLM("demo", speculative_config="none", **options).generate(PROMPTS, greedy)]
    drafted = [output.outputs[0].token_ids for output in LLM("demo", **options).generate(PROMPTS, greedy)]
    same = sum(a == b for a, b in zip(plain, drafted, strict=True))
    print(f"\n{same} of {len(PROMPTS)} texts are equal with drafts")
    assert same >= len(PROMPTS) // 2, "a tree's keys are summed in another order: near ties may part, texts at large may not"
