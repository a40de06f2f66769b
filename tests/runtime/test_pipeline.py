"""A model over stages, each a process or two of this host over loopback TCP: its texts, its starts, its ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.tiny import make_tiny
from model.tokenizer import Tokenizer
from runtime import loading, stages
from runtime.api import LLM
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.lives import RankFailed
from runtime.speculate import NoSpeculation, TreeSpeculation
from runtime.stage_comm import HostNeighbours
from runtime.stage_hello import StageRefused
from runtime.types import Request, SamplingParams
from tests.runtime.test_processes import GREEDY, SEEDED, children, gone, requests, texts, texts_or_raise
from tests.waits import turns
from tests.worlds import Got, World, run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("stages") / "tiny", seed=4, num_hidden_layers=3))


def open_world(tiny: str, pp: int, tp: int = 1, **config: Any) -> World:
    speculative = SpeculativeConfig(method="ddtree")
    source = loading.open_source(tiny, speculative)
    fitted = EngineConfig(**{"max_model_len": 256, "num_pages": 200, "max_num_batched_tokens": 64, "step_deadline_s": 20.0, **config})
    fitted = loading.fit_config(fitted, source, "float32")
    return World(stages.make_executor(source, fitted, speculative, "float32", tp, stages=pp), fitted, Tokenizer.load(source.path))


@pytest.fixture
def two(tiny: str) -> Iterator[World]:
    shm, before = set(os.listdir("/dev/shm")), children()
    world = open_world(tiny, 2)
    assert len(children()) == len(before) + 1
    yield world
    world.executor.close()
    assert children() == before
    assert set(os.listdir("/dev/shm")) == shm


def drafted(world: World, params: SamplingParams, trees: bool = True) -> list[Any]:
    """Tokens, log-probabilities, what was accepted: all of it, for the bits are the same."""
    speculation = TreeSpeculation(world.executor, SpeculativeConfig(tree_budget=5)) if trees else NoSpeculation()
    got = run(world.engine(speculation), requests(params.replace(max_tokens=8), 2))
    return [(g.tokens, g.logprobs, g.steps, g.accepted) for g in got.values()]


def test_stages_give_the_texts_of_one_rank_with_and_without_trees(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And other ones where the hidden states that travel are other ones."""
    one, send = open_world(tiny, 1), HostNeighbours.send
    for pp, cases in ((2, [(GREEDY, True), (SEEDED, True), (SEEDED, False)]), (3, [(SEEDED, True)])):
        many = open_world(tiny, pp)
        for case in cases:
            assert drafted(many, *case) == drafted(one, *case)
        with monkeypatch.context() as patched:
            patched.setattr(HostNeighbours, "send", lambda self, x: send(self, x * np.float32(1.5)))
            assert [got[0] for got in drafted(many, *case)] != [got[0] for got in drafted(one, *case)]
        many.executor.close()


def test_stages_of_two_ranks_give_the_texts_of_two_ranks(tiny: str) -> None:
    shm, before = set(os.listdir("/dev/shm")), children()
    one, many = open_world(tiny, 1, tp=2), open_world(tiny, 2, tp=2)
    assert drafted(many, SEEDED) == drafted(one, SEEDED)
    one.executor.close()
    many.executor.close()
    assert children() == before and set(os.listdir("/dev/shm")) == shm


def test_the_api_takes_the_size_and_says_it(tiny: str) -> None:
    one, two = (LLM(tiny, max_model_len=128, pipeline_parallel_size=pp) for pp in (1, 2))
    assert "TP 1, 2 stages" in two.loaded.summary and "stages" not in one.loaded.summary
    want = [o.outputs[0].token_ids for o in one.generate(["abc", "x = 3"], GREEDY)]
    assert [o.outputs[0].token_ids for o in two.generate(["abc", "x = 3"], GREEDY)] == want
    os.kill(children()[-1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"failed: .*RankFailed: stage 1 was killed by signal 9"):
        two.generate(["abc"], GREEDY)
    for pp in (0, 4):
        with pytest.raises(ValueError, match=f"pipeline_parallel_size {pp} does not cut this model; legal: 1 to 3, its layers"):
            LLM(tiny, pipeline_parallel_size=pp)


def test_a_clean_stop_leaves_no_process(two: World) -> None:
    assert texts(two, GREEDY)
    two.executor.close()
    two.executor.close()  # again does nothing
    with pytest.raises(RankFailed, match="the stages were stopped"):
        texts_or_raise(two)


def test_a_killed_stage_ends_every_request_with_an_error(two: World) -> None:
    engine = two.engine(NoSpeculation())
    got = {request.id: Got() for request in requests(GREEDY)}
    for request in requests(GREEDY):
        engine.submit(request, got[request.id].add)
    for _ in range(4):
        engine.step()
    assert engine.check_health() is None
    os.kill(children()[-1], signal.SIGKILL)
    begun = time.monotonic()
    for _ in turns(lambda: any(g.finish is None for g in got.values()), "requests without an end"):
        engine.step()
    assert time.monotonic() - begun < 5
    assert {g.finish for g in got.values()} == {"error"}
    assert "stage 1 was killed by signal 9" in str(engine.dead) and str(engine.dead) in str(engine.check_health())


def test_a_stage_that_dies_while_nothing_runs_is_noticed_too(two: World) -> None:
    engine = two.engine(NoSpeculation())
    os.kill(children()[-1], signal.SIGKILL)
    end = time.monotonic() + 5
    while engine.check_health() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "stage 1 was killed by signal 9" in str(engine.check_health())
    with pytest.raises(RankFailed, match="signal 9"):
        texts_or_raise(two)


def test_a_rank_of_another_stage_that_dies_ends_all(tiny: str) -> None:
    """Stage 1's second rank is its leader's child: the leader hears of it and tells."""
    others = children()  # of worlds that other tests of this process keep open
    world = open_world(tiny, 2, tp=2)
    mine = sorted(set(children()) - set(others))
    grandchildren = [pid for parent in mine for pid in kin(parent)]
    assert len(mine) == 2 and len(grandchildren) == 1
    os.kill(grandchildren[0], signal.SIGKILL)
    end = time.monotonic() + 5
    while world.executor.trouble() is None:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "rank 1 was killed by signal 9" in world.executor.trouble()  # type: ignore[attr-defined]
    world.executor.close()
    assert all(gone(pid) for pid in mine)


def kin(parent: int) -> list[int]:
    return [int(pid) for task in Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split()]


def test_a_silent_stage_is_ended_at_the_deadline(tiny: str) -> None:
    world = open_world(tiny, 2, step_deadline_s=0.5)
    child = children()[-1]
    os.kill(child, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=r"stage 1 has not answered for 0.5 s"):
        texts_or_raise(world)
    assert time.monotonic() - begun < 5
    assert gone(child), "and is killed, though stopped"


def test_a_failure_of_a_stage_is_told_with_its_cause(two: World) -> None:
    engine = two.engine(NoSpeculation())
    two.executor._lives.more[0].send(9, bytes(8))  # type: ignore[attr-defined]  # states that no step has sent
    engine.submit(Request("a", requests(GREEDY, 1)[0].prompt, GREEDY, seed=1))
    engine.step()
    assert str(engine.dead).startswith("stage 1 ") and "StageLost: stage 0 sent 8 bytes of hidden states" in str(engine.dead)


def test_a_stage_that_was_told_other_things_is_refused_with_both_values(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, make = children(), stages.stage_job

    def other(*parts: Any) -> Any:
        job = make(*parts)
        return dataclasses.replace(job, config=job.config.replace(max_num_seqs=7)) if job.stage else job

    monkeypatch.setattr(stages, "stage_job", other)
    with pytest.raises(StageRefused, match="max_num_seqs is 64 here and 7 at stage 1"):
        open_world(tiny, 2)
    assert children() == before


def test_a_stage_that_can_not_start_says_why(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, make = children(), stages.stage_job

    def other(*parts: Any) -> Any:
        job = make(*parts)
        return dataclasses.replace(job, model=str(tmp_path)) if job.stage else job

    monkeypatch.setattr(stages, "stage_job", other)
    with pytest.raises(RankFailed, match=r"stage 1 ended with exit code 1: FileNotFoundError: .*config.json"):
        open_world(tiny, 2)
    assert children() == before
