"""Ranks as processes: what they compute, how they start, stop, fail and are noticed. The model is a random tiny one."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.tiny import make_tiny
from runtime import loading
from runtime.api import LLM
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.processes import ProcessRanks, RankFailed
from runtime.spawn import SpawnedPeers
from runtime.speculate import NoSpeculation, TreeSpeculation
from runtime.types import DraftPlan, Request, SamplingParams
from tests.waits import turns
from tests.worlds import Got, World, load_world, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24, ignore_eos=True, logprobs=2, presence_penalty=0.3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("ranks") / "tiny"))


def children() -> list[int]:
    """Process ids of this process's rank processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and b"runtime.rank" in command:
            found.append(int(path.parent.name))
    return sorted(found)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def open_world(tiny: str, tp: int, **config: Any) -> World:
    return load_world(tiny, tp=tp, max_model_len=256, num_pages=200, max_num_batched_tokens=64, **config)


@pytest.fixture
def two(tiny: str) -> Iterator[World]:
    shm, before = set(os.listdir("/dev/shm")), children()
    world = open_world(tiny, 2, step_deadline_s=20.0)
    assert len(children()) == len(before) + 1
    assert set(os.listdir("/dev/shm")) == shm, "the block has no name"
    yield world
    world.executor.close()
    assert children() == before
    assert set(os.listdir("/dev/shm")) == shm


def requests(params: SamplingParams, count: int = 5) -> list[Request]:
    return [Request(str(i), np.arange(3 + i, 12 + 3 * i, dtype=np.int32), params, seed=70 + i) for i in range(count)]


def texts(world: World, params: SamplingParams) -> list[tuple[int, ...]]:
    return [got.tokens for got in run(world.engine(NoSpeculation()), requests(params)).values()]


@pytest.mark.parametrize("tp", [2, 4])
def test_texts_are_those_of_one_rank_with_and_without_speculation(tiny: str, tp: int) -> None:
    one = LLM(tiny, max_model_len=256, speculative_config="none")
    many = LLM(tiny, max_model_len=256, tensor_parallel_size=tp)  # with drafts
    prompts = ["abc", "the quick brown fox", "x = 3"]
    for params in (GREEDY, dataclasses.replace(SEEDED, logprobs=None, seed=5)):
        want = [output.outputs[0].token_ids for output in one.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in many.generate(prompts, params)] == want


def test_a_clean_stop_leaves_no_process(two: World) -> None:
    assert texts(two, GREEDY)
    two.executor.close()
    two.executor.close()  # again does nothing
    with pytest.raises(RankFailed, match="the ranks were stopped"):
        texts_or_raise(two)


def texts_or_raise(world: World) -> None:
    """A step straight through the executor; the engine would turn its error into emissions."""
    engine = world.engine(NoSpeculation())
    engine.submit(requests(GREEDY, 1)[0])
    engine.step()
    if engine.dead is not None:
        raise engine.dead


def test_what_is_forgotten_takes_its_processes_along(tiny: str) -> None:
    before = children()
    world = open_world(tiny, 2)
    assert len(children()) == len(before) + 1
    del world
    gc.collect()
    assert children() == before


def test_a_killed_rank_ends_every_request_with_an_error(two: World) -> None:
    engine = two.engine(NoSpeculation())
    got = {request.id: Got() for request in requests(GREEDY)}
    errors: list[str | None] = []
    for request in requests(GREEDY):
        engine.submit(request, lambda e: (got[e.id].add(e), errors.append(e.error) if e.error else None))
    for _ in range(4):
        engine.step()
    assert engine.check_health() is None
    os.kill(children()[-1], signal.SIGKILL)
    begun = time.monotonic()
    for _ in turns(lambda: any(g.finish is None for g in got.values()), "requests without an end"):
        engine.step()
    assert time.monotonic() - begun < 5
    assert {g.finish for g in got.values()} == {"error"} and len(errors) == len(got)
    assert "rank 1 was killed by signal 9" in str(engine.dead)
    assert "signal" not in str(errors), "causes go to the log"
    assert engine.check_health() is not None


def test_a_rank_that_dies_while_nothing_runs_is_noticed_too(two: World) -> None:
    engine = two.engine(NoSpeculation())
    os.kill(children()[-1], signal.SIGKILL)
    end = time.monotonic() + 5
    while engine.check_health() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "rank 1 was killed by signal 9" in str(engine.check_health())
    with pytest.raises(RankFailed, match="signal 9"):
        texts_or_raise(two)


def test_a_rank_that_hangs_is_ended_at_the_deadline(tiny: str) -> None:
    world = open_world(tiny, 2)
    executor = world.executor
    assert isinstance(executor, ProcessRanks)
    executor._group._watch._deadline_s = executor._ring._watch._deadline_s = 0.5
    executor._worker._comm._watch._deadline_s = 0.5
    child = children()[-1]
    os.kill(child, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 has not .* for \d+ s \(limit 0.5 s\)"):
        texts_or_raise(world)
    assert time.monotonic() - begun < 5
    assert gone(child), "and is killed, though stopped"


def test_ranks_that_disagree_are_found(two: World) -> None:
    executor = two.executor
    assert isinstance(executor, ProcessRanks)
    good = executor._worker.step

    def lies(plan: Any) -> Any:
        result = good(plan)
        return dataclasses.replace(result, target=result.target + 1)

    executor._worker.step = lies
    with pytest.raises(RankFailed, match="rank 1 drew other tokens than rank 0"):
        texts_or_raise(two)


def test_a_failure_of_rank_0_ends_the_others(tiny: str) -> None:
    world = open_world(tiny, 2)
    executor = world.executor
    assert isinstance(executor, ProcessRanks)
    child = children()[-1]

    def fails(plan: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    executor._worker.step = fails
    with pytest.raises(RuntimeError, match="illegal memory"):
        texts_or_raise(world)
    assert gone(child)
    assert "illegal memory" in str(executor.trouble())


@pytest.mark.parametrize("broken", ["model", "parent"])
def test_a_rank_that_can_not_start_says_why(tiny: str, tmp_path: Path, broken: str) -> None:
    speculative = SpeculativeConfig()
    source = loading.open_source(tiny, speculative)
    config = loading.fit_config(EngineConfig(max_model_len=64, num_pages=20, max_num_batched_tokens=64), source, "float32")
    job = loading.rank_job(source, config, speculative, "float32", "numpy", 1, 2)
    job = dataclasses.replace(job, model=str(tmp_path)) if broken == "model" else dataclasses.replace(job, parent=1)
    before = children()
    match = r"rank 1 ended with exit code 1: FileNotFoundError: .*config.json" if broken == "model" else "rank 1 ended with exit code 1$"
    with pytest.raises(RankFailed, match=match):
        ProcessRanks(
            loading.meeting_of(source, config, speculative, "numpy", 2),
            SpawnedPeers([job]),
            lambda comm: loading.make_rank(source, config, speculative, "float32", "numpy", comm),
        )
    assert children() == before


def test_a_size_that_does_not_divide_is_refused_with_the_legal_ones(tiny: str) -> None:
    before = children()
    with pytest.raises(ValueError, match=r"tensor_parallel_size 3 does not divide this model; legal: 1, 2, 4"):
        open_world(tiny, 3)
    assert children() == before


@pytest.mark.parametrize("tp", [2, 4])
def test_a_drafter_cut_over_ranks_proposes_what_a_whole_one_does(tiny: str, tp: int) -> None:
    """Two key heads: cut at TP 2, held whole by every rank at TP 4. Context first, then a block that reads it."""
    one, many = open_world(tiny, 1), open_world(tiny, tp)
    results = []
    for world in (one, many):
        engine = world.engine(TreeSpeculation(world.executor, SpeculativeConfig(tree_budget=4)))
        got = run(engine, requests(dataclasses.replace(GREEDY, logprobs=0), 3))
        tokens = np.array([5, 9], np.int32)
        pages, none = np.array([[1, 2], [3, 4]], np.int32), np.zeros(0, np.int32)
        drafted = world.executor.draft(DraftPlan(tokens, np.array([9, 3], np.int32), pages, none, none, none))
        results.append(([g.tokens for g in got.values()], sum(g.accepted for g in got.values()), drafted))
    (want, accepted, whole), (mine, also, cut) = results
    assert mine == want and also == pytest.approx(accepted, abs=3)
    assert np.abs(cut.logp - whole.logp).max() < 1e-3
    assert (cut.ids == whole.ids).mean() > 0.9, "near ties may change places"
    many.executor.close()
