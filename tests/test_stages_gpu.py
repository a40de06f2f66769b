"""Two stages on two GPUs: the demo model's texts are those of one GPU, token for token, and a dead stage is noticed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from runtime import LLM, SamplingParams
from tests.runtime.test_processes import children
from tests.test_ranks_gpu import PROMPTS

pytestmark = pytest.mark.multi_gpu


def texts(llm: LLM) -> tuple[list[tuple[int, ...]], float]:
    """Token ids of all prompts, greedy and drawn, and seconds that a lone stream of 64 tokens took."""
    found = [
        output.outputs[0].token_ids
        for params in (SamplingParams(temperature=0.0, max_tokens=48), SamplingParams(temperature=0.8, seed=11, max_tokens=48))
        for output in llm.generate(PROMPTS, params)
    ]
    begun = time.perf_counter()
    llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    return found, time.perf_counter() - begun


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("method", ["none", "ddtree"])
def test_texts_are_those_of_one_gpu(eager: bool, method: str) -> None:
    """The same kernels on the same rows; hidden states are copied as they lie, so no token may differ."""
    options: dict[str, Any] = {"backend": "cuda", "max_model_len": 512, "enforce_eager": eager, "speculative_config": method}
    want, alone_s = texts(LLM("demo", **options))
    got, piped_s = texts(LLM("demo", pipeline_parallel_size=2, **options))
    print(f"\n{method}, {'eager' if eager else 'graphs'}: a stream of 64 tokens took {alone_s:.3f} s on one, {piped_s:.3f} s on two")
    assert got == want


def test_a_dead_stage_ends_the_other_within_10_s() -> None:
    before = children()
    llm = LLM("demo", backend="cuda", max_model_len=512, pipeline_parallel_size=2, speculative_config="none")
    (stage,) = set(children()) - set(before)
    os.kill(stage, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"failed: .*stage 1 was killed by signal 9"):
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=48))
    assert time.monotonic() - begun < 10
    assert "stage 1 was killed by signal 9" in str(llm.loaded.engine.check_health())
