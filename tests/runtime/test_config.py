"""Configurations: defaults, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import json

import pytest

from runtime.config import EngineConfig, SpeculativeConfig

parse = SpeculativeConfig.parse


def test_no_speculation_unless_asked_for() -> None:
    for given in (None, "none", {"method": None}, {"method": "none", "tree_budget": 64}, '{"method": null}'):
        assert not parse(given).enabled, given


def test_forms_of_one_configuration_are_equal() -> None:
    want = SpeculativeConfig(method="ddtree")
    for given in ("ddtree", {}, {"method": "ddtree"}, '{"method": "ddtree", "tree_budget": null}', want):
        assert parse(given) == want, given


def test_a_budget_may_be_left_to_the_curve() -> None:
    assert parse({"tree_budget": "auto"}).tree_budget == "auto"


def test_every_key_arrives() -> None:
    given = {
        "method": "ddtree",
        "model": "/models/drafter",
        "num_speculative_tokens": 5,
        "tree_budget": 32,
        "draft_rope_attention_factor": 1.4159,
        "draft_top_k": 8,
    }
    assert dataclasses.asdict(parse(json.dumps(given))) == given
    assert set(given) == {field.name for field in dataclasses.fields(SpeculativeConfig)}, "a key that this test does not know"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "eagle"}, ["method", "'eagle'", "ddtree, dflash, none"]),
        ({"metod": "ddtree"}, ["unknown 'metod'", "legal keys are method, model, num_speculative_tokens, tree_budget"]),
        ({"tree_budget": 0}, ["tree_budget", "0", "[1, 1023]"]),
        ({"tree_budget": True}, ["tree_budget", "True"]),
        ({"tree_budget": 2.0}, ["tree_budget", "2.0"]),
        ({"tree_budget": "many"}, ["tree_budget", "'many'", "'auto'"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens"]),
        ({"draft_top_k": -1}, ["draft_top_k"]),
        ({"draft_rope_attention_factor": float("nan")}, ["draft_rope_attention_factor", "nan"]),
        ({"draft_rope_attention_factor": "1"}, ["draft_rope_attention_factor"]),
        ({"model": ""}, ["model"]),
        ({"method": "dflash", "tree_budget": 8}, ["tree_budget", "dflash"]),
        ("{broken", ["not JSON", "{broken"]),
        ("[1]", ["JSON object", "list"]),
        (5, ["int"]),
    ],
)
def test_bad_speculation_is_refused_by_name(given: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse(given)  # type: ignore[arg-type]
    for word in ["speculative_config", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_batched_tokens": 8}, ["max_num_batched_tokens", "8", "max_num_seqs 64"]),
        ({"max_model_len": 1}, ["max_model_len"]),
        ({"block_size": -4}, ["block_size", "-4"]),
        ({"num_pages": 1}, ["num_pages"]),
        ({"max_num_queued_reqs": -1}, ["max_num_queued_reqs"]),
        ({"step_deadline_s": 0}, ["step_deadline_s"]),
        ({"buckets": (16, 8)}, ["buckets", "do not rise"]),
        ({"buckets": (16, 16)}, ["do not rise"]),
        ({"buckets": (64, 1024)}, ["1024", "max_num_batched_tokens 2048"]),
    ],
)
def test_bad_engine_config_is_refused_by_name(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(**change)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_bucket_is_the_smallest_that_holds_the_rows() -> None:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, buckets=(1, 8, 64))
    assert [config.bucket_for(m) for m in (1, 2, 8, 9, 64)] == [1, 8, 8, 64, 64]
    assert EngineConfig().bucket_for(37) == 37
