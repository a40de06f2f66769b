"""Random schemas on a tiny random model: every text validates, and no draft changes any of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.grammar import GrammarCompiler, GrammarState
from model.tiny import make_tiny
from runtime import LLM
from runtime.constraint import StructuredOutputs
from runtime.speculate import NoSpeculation, Speculator
from runtime.types import DraftTree, InvalidRequest, Request, SamplingParams
from tests.schemas import conforms, random_schema
from tests.worlds import BudgetByRequest, Got, RandomTrees, World, load_world, run

COUNT = 500
TOKENS = 200


@dataclass
class Job:
    schema: dict[str, Any]
    request: Request
    thinking: bool


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return load_world(make_tiny(tmp_path_factory.mktemp("tiny")), max_model_len=512, num_pages=3000)


@pytest.fixture(scope="module")
def jobs(world: World) -> list[Job]:
    """Half of the prompts leave the model in its reasoning; greedy, hot and penalised sampling take turns."""
    rng = random.Random(8)
    compiler = GrammarCompiler(world.tokenizer, world.executor.limits.vocab_size)
    think_end = world.tokenizer.special["</think>"]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ]
    made = []
    for i in range(COUNT):
        schema, thinking = random_schema(rng), i % 2 == 1
        prompt = world.tokenizer.encode(f"schema {i}") + ([world.tokenizer.special["<think>"]] if thinking else [])
        way = ways[i % 4]
        # A random model would think for ever; 3 of 4 stop at once, the others after a while.
        bias = {think_end: 100.0 if i % 8 != 1 else 5.0} if thinking else {}
        params = SamplingParams(max_tokens=TOKENS, logit_bias=bias, **way)
        constraint = compiler.compile(StructuredOutputs(json=schema), thinking)
        made.append(Job(schema, Request(str(i), np.array(prompt, np.int32), params, 100 + i, constraint=constraint), thinking))
    return made


@pytest.fixture(scope="module")
def plain(world: World, jobs: list[Job]) -> dict[str, Got]:
    return run(world.engine(NoSpeculation()), [job.request for job in jobs])


def answer_of(world: World, got: Got) -> str:
    tokens, end = list(got.tokens), world.tokenizer.special["</think>"]
    return world.tokenizer.decode(tokens[tokens.index(end) + 1 if end in tokens else 0 :])


def wrong(world: World, jobs: Sequence[Job], got: dict[str, Got]) -> list[str]:
    """Jobs that did not end by themselves, or whose text the schema does not allow."""
    bad = []
    for job in jobs:
        one = got[job.request.id]
        if one.finish == "length" and world.tokenizer.special["</think>"] not in one.tokens and job.thinking:
            continue  # it never stopped thinking
        try:
            held = one.finish == "stop" and conforms(json.loads(answer_of(world, one)), job.schema)
        except ValueError:
            held = False
        if not held:
            bad.append(f"{job.request.id} {one.finish}: {one.text!r} for {job.schema}")
    return bad


def test_every_text_validates(world: World, jobs: list[Job], plain: dict[str, Got]) -> None:
    assert wrong(world, jobs, plain) == []
    answered = sum(got.finish == "stop" for got in plain.values())
    assert answered > 0.85 * COUNT


def test_the_judge_notices(world: World, jobs: list[Job], plain: dict[str, Got]) -> None:
    """The mutation: every job judged by its neighbour's schema."""
    turned = [Job(jobs[i - 1].schema, job.request, job.thinking) for i, job in enumerate(jobs)]
    assert len(wrong(world, turned, plain)) > COUNT // 2


@pytest.mark.parametrize("method", ["ddtree", "random"])
def test_drafts_change_nothing(world: World, jobs: list[Job], plain: dict[str, Got], method: str) -> None:
    trees: dict[str, Speculator] = {
        "ddtree": BudgetByRequest(world.executor),
        "random": RandomTrees(plain, {job.request.id: len(job.request.prompt) for job in jobs}, world.executor.limits.vocab_size),
    }
    some = jobs if method == "random" else jobs[: COUNT // 3]
    got = run(world.engine(trees[method]), [job.request for job in some])
    assert [id for id in got if (got[id].tokens, got[id].finish) != (plain[id].tokens, plain[id].finish)] == []
    if method == "random":
        assert sum(one.accepted for one in got.values()) > 2 * COUNT, "whole runs were accepted under their masks"


def test_masks_of_the_wrong_node_are_noticed(world: World, jobs: list[Job], plain: dict[str, Got], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: every node is held to what may follow the root."""
    right = GrammarState.masks

    def wrong_masks(self: GrammarState, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        nodes, bits = right(self, tree)
        return nodes, np.repeat(bits[:1], len(nodes), axis=0)

    monkeypatch.setattr(GrammarState, "masks", wrong_masks)
    some = jobs[:40]
    trees = RandomTrees(plain, {job.request.id: len(job.request.prompt) for job in some}, world.executor.limits.vocab_size)
    got = run(world.engine(trees), [job.request for job in some])
    assert sum(got[id].tokens != plain[id].tokens for id in got) > 10


def test_masks_reach_every_rank(tmp_path: Path, world: World, jobs: list[Job]) -> None:
    """Two ranks read the plan out of its blob; their sums differ from one rank's, so texts may, validity may not."""
    two = load_world(make_tiny(tmp_path), tp=2, max_model_len=512, num_pages=300)
    some = jobs[:16:2]
    got = run(two.engine(BudgetByRequest(two.executor)), [job.request for job in some])
    two.executor.close()
    assert wrong(world, some, got) == []


def test_a_failing_grammar_ends_its_request_alone(world: World, jobs: list[Job], plain: dict[str, Got]) -> None:
    class Failing:
        error: str | None = None

        def start(self) -> Failing:
            return self

        def masks(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
            raise RuntimeError("no masks")

        def prune(self, tree: DraftTree) -> DraftTree:
            return tree

        def push(self, tokens: Sequence[int]) -> None: ...

    good = [job.request for job in jobs[:4]]
    bad = replace(good[0], id="bad", constraint=Failing())
    got = run(world.engine(NoSpeculation()), [*good, bad])
    assert (got["bad"].finish, got["bad"].tokens) == ("error", ())
    assert all(got[request.id].tokens == plain[request.id].tokens for request in good)


def test_the_offline_class_takes_structured_outputs(tmp_path: Path) -> None:
    llm = LLM(make_tiny(tmp_path), max_model_len=256)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100, structured_outputs=StructuredOutputs(choice=["left", "right"]))
    assert llm.generate("x", params)[0].outputs[0].text in ("left", "right")
    with pytest.raises(InvalidRequest, match="regex"):
        llm.generate("x", params.replace(structured_outputs=StructuredOutputs(regex="[")))
    with pytest.raises(InvalidRequest, match="min_tokens"):
        llm.generate("x", params.replace(min_tokens=3))
