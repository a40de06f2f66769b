"""Sampling fields, the clamp to the context, prompt ids."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.types import SamplingParams
from server.errors import ApiError
from server.params import check_prompt_ids, fit_to_context, make_sampling
from server.protocol import CompletionRequest

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=None)


def sampling(max_tokens: int | None = None, logprobs: int | None = None, **fields: object) -> SamplingParams:
    return make_sampling(CompletionRequest(prompt="a", **fields), DEFAULTS, 300, max_tokens=max_tokens, logprobs=logprobs)  # type: ignore[arg-type]


def refused(**fields: object) -> str | None:
    with pytest.raises(ApiError) as caught:
        sampling(**fields)  # type: ignore[arg-type]
    assert caught.value.status == 400
    return caught.value.param


def test_absent_fields_take_the_checkpoints_defaults() -> None:
    params = sampling()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.95, None)
    assert sampling(temperature=0.0).temperature == 0.0, "0 is a value, not absence"


def test_every_field_arrives() -> None:
    fields = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "seed": 7,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -2,
    }
    extra = {"tree_budget": 4, "draft_weight": 2.5, "tpot_target_ms": 20}
    params = sampling(max_tokens=9, logprobs=4, stop="x", stop_token_ids=[3], logit_bias={"5": -100}, vllm_xargs=extra, **fields)
    assert params.extra_args == extra
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.max_tokens, params.logprobs, params.stop, params.stop_token_ids, params.logit_bias) == (9, 4, ("x",), (3,), {5: -100})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"seed": 2**70}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -24}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"300": 1.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {"٣": 1.0}}, "logit_bias"),  # a digit, but no ASCII one
        ({"logit_bias": {"1": 101.0}}, "logit_bias"),
        ({"logit_bias": {str(i): 1.0 for i in range(1025)}}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"priority": 2**40}, "priority"),
        ({"vllm_xargs": {"speed": 1}}, "vllm_xargs"),
        ({"vllm_xargs": {"tree_budget": 1024}}, "vllm_xargs.tree_budget"),
        ({"vllm_xargs": {"tree_budget": 1.5}}, "vllm_xargs.tree_budget"),
        ({"vllm_xargs": {"draft_weight": 0.0}}, "vllm_xargs.draft_weight"),
        ({"vllm_xargs": {"tpot_target_ms": float("nan")}}, "vllm_xargs.tpot_target_ms"),
    ],
)
def test_out_of_range_is_named(fields: dict[str, object], field: str) -> None:
    assert refused(**fields) == field


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [299]}, {"logit_bias": {"299": -100.0}}, {"seed": -(2**63)}, {"stop": ["a"] * 4}, {"top_k": -1}]
)
def test_the_edge_itself_is_legal(fields: dict[str, object]) -> None:
    sampling(**fields)  # type: ignore[arg-type]


def test_max_tokens_is_clamped_to_the_context() -> None:
    for asked in (None, 10**8, 10**12, 90):
        assert fit_to_context(sampling(max_tokens=asked), 10, 100, "prompt").max_tokens == 90
    assert fit_to_context(sampling(max_tokens=89), 10, 100, "prompt").max_tokens == 89
    assert fit_to_context(sampling(), 99, 100, "prompt").max_tokens == 1


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ApiError, match="100 tokens") as caught:
        fit_to_context(sampling(), 100, 100, "messages")
    assert caught.value.param == "messages"
    with pytest.raises(ApiError) as caught:
        fit_to_context(sampling(min_tokens=91), 10, 100, "prompt")
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(("ids", "field"), [([], "p"), ([-1], "p[0]"), ([1, 300], "p[1]"), ([4294967295], "p[0]"), ([1, 10**30], "p[1]")])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_prompt_ids(ids, 300, "p")
    assert caught.value.param == field


def test_ids_inside_pass() -> None:
    ids = check_prompt_ids([0, 299], 300, "p")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 299]
