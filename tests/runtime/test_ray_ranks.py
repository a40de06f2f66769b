"""Ranks as Ray actors on a loopback Ray of this test's own; skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator

import pytest

from model.tiny import make_tiny
from runtime import loading
from runtime.api import LLM
from runtime.lives import RankFailed
from runtime.pipeline import Pipeline
from runtime.processes import ProcessRanks
from runtime.ray_ranks import RayStages
from runtime.types import SamplingParams

HAVE_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAVE_RAY, reason="Ray is not installed (pip install 'threshold-runtime[ray]')")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=16, ignore_eos=True, seed=4)
PROMPTS = ["abc", "the quick brown fox"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("ray") / "tiny"))


@pytest.fixture(scope="module")
def loopback() -> Iterator[None]:
    """Ray on 127.0.0.1 with four CPUs to give, without a dashboard, usage reports, or a token file in the home folder."""
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    import ray

    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def texts(llm: LLM) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for params in (GREEDY, SEEDED) for output in llm.generate(PROMPTS, params)]


def await_room_given_back() -> None:
    import ray

    end = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 4:
        assert time.monotonic() < end, "the placement group was not given back"
        time.sleep(0.1)


@needs_ray
def test_two_ranks_give_the_text_of_one(tiny: str, loopback: None) -> None:

    want = texts(LLM(tiny, max_model_len=128))
    llm = LLM(tiny, max_model_len=128, tensor_parallel_size=2, distributed_executor="ray")
    assert texts(llm) == want
    executor = llm.loaded.engine._cycle._executor
    assert isinstance(executor, ProcessRanks)
    executor.close()
    await_room_given_back()


@needs_ray
def test_a_dead_actor_ends_the_group(tiny: str, loopback: None) -> None:
    import ray

    llm = LLM(tiny, max_model_len=128, tensor_parallel_size=2, distributed_executor="ray")
    executor = llm.loaded.engine._cycle._executor
    assert isinstance(executor, ProcessRanks)
    ray.kill(executor._group._peers._actors[1])
    with pytest.raises(RuntimeError, match="failed"):
        llm.generate(PROMPTS, GREEDY)
    assert "rank 1 ended: " in str(executor.trouble())
    with pytest.raises(RankFailed):
        llm.loaded.engine._cycle._executor.draft(None)  # type: ignore[arg-type]


@needs_ray
@pytest.mark.parametrize("tp", [1, 2])
def test_two_stages_give_the_text_of_one(tiny: str, loopback: None, tp: int) -> None:
    """Every rank but the first is an actor; one placement group holds a bundle for each stage."""
    import ray
    from ray.util.placement_group import placement_group_table

    want = texts(LLM(tiny, max_model_len=128, tensor_parallel_size=tp))
    llm = LLM(tiny, max_model_len=128, tensor_parallel_size=tp, pipeline_parallel_size=2, distributed_executor="ray")
    assert texts(llm) == want
    (group,) = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
    assert [bundle["CPU"] for bundle in group["bundles"].values()] == [tp, tp]
    assert len(ray.util.list_named_actors()) == 0 and ray.available_resources().get("CPU", 0.0) == 4 - 2 * tp
    executor = llm.loaded.engine._cycle._executor
    assert isinstance(executor, Pipeline)
    executor.close()
    await_room_given_back()


@needs_ray
def test_a_dead_stage_ends_the_others(tiny: str, loopback: None) -> None:
    import ray

    llm = LLM(tiny, max_model_len=128, pipeline_parallel_size=2, distributed_executor="ray")
    executor = llm.loaded.engine._cycle._executor
    assert isinstance(executor, Pipeline)
    ray.kill(executor._lives._peers._actors[1])
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="failed"):
        llm.generate(PROMPTS, GREEDY)
    assert time.monotonic() - begun < 10
    assert "stage 1 " in str(executor.trouble())


@needs_ray
def test_devices_are_counted_by_host_and_stages_spread_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU a stage begins with, where two of three stages share a host; and one host each where there are enough."""
    import ray

    placing = importlib.import_module("ray.util.placement_group")
    asked: list[str] = []
    monkeypatch.setattr("runtime.ray_ranks.join_cluster", lambda: ray)
    monkeypatch.setattr("runtime.ray_ranks._node_address", lambda ray: "10.0.0.1")
    monkeypatch.setattr("runtime.ray_ranks.reserve", lambda ray, bundles, strategy, name: asked.append(strategy))
    monkeypatch.setattr(placing, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a", 1: "b", 2: "a"}})
    for hosts, strategy in ((2, "PACK"), (3, "STRICT_SPREAD")):
        monkeypatch.setattr(ray, "nodes", lambda hosts=hosts: [{"Alive": True}] * hosts + [{"Alive": False}])
        assert RayStages(3, 4, "cuda").devices == [0, 0, 4]
        assert asked[-1] == strategy


@needs_ray
def test_a_group_that_does_not_fit_is_refused(tiny: str, loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.ray_ranks.PLACE_S", 1.0)
    from ray.util.placement_group import placement_group, remove_placement_group

    held = placement_group([{"CPU": 3}])
    held.wait(10)
    with pytest.raises(RankFailed, match="Ray has not placed 2 ranks"):
        LLM(tiny, max_model_len=128, tensor_parallel_size=2, distributed_executor="ray")
    with pytest.raises(RuntimeError, match=r"Ray has not placed 2 stages of {'CPU': 1, 'node:.*': 0.001} \(PACK\) within 1 s"):
        LLM(tiny, max_model_len=128, pipeline_parallel_size=2, distributed_executor="ray")
    remove_placement_group(held)


@pytest.mark.skipif(HAVE_RAY, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(tiny: str) -> None:
    with pytest.raises(ValueError, match=r"distributed_executor: 'ray' needs Ray; pip install"):
        LLM(tiny, max_model_len=128, tensor_parallel_size=2, distributed_executor="ray")


def test_another_executor_is_refused(tiny: str) -> None:
    with pytest.raises(ValueError, match="distributed_executor: 'mpi' is not one of local, ray"):
        LLM(tiny, distributed_executor="mpi")
    assert loading.DISTRIBUTED == ("local", "ray")
