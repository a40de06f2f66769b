"""Ranks 1 and up as Ray actors: Ray places and starts them and notices their deaths; plans and sums never go through it.

A placement group reserves a bundle for each rank, all on the host where rank 0 runs, for the ranks meet in its memory. An actor
call takes Ray 3 ms, so it is used to start, to wait and to end. Ray is an extra: pip install 'threshold-runtime[ray]'.

GPU-unverified: on GPUs rank r takes device r of the host, whatever Ray calls it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any

from runtime.processes import RankEvent
from runtime.spawn import ROOT, RankJob

PLACE_S = 60.0  # for the placement group
POLL_S = 0.2
INHERITED = ("RUNTIME_", "OPENBLAS_", "NCCL_")  # variables that an actor gets from rank 0; Ray's workers have the cluster's otherwise


def check_ray() -> None:
    """Raises ValueError saying what to install if Ray is absent."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError("distributed_executor: 'ray' needs Ray; pip install 'threshold-runtime[ray]', or take 'local'")


class RankActor:
    """One rank in a Ray worker process."""

    def __init__(self) -> None:
        self._rank: Any = None

    def load(self, job: str) -> None:
        """Opens the group's block and loads this rank's share."""
        from runtime.rank import Rank

        self._rank = Rank(RankJob.from_json(job))

    def follow(self) -> None:
        """Executes rank 0's plans until it stops."""
        self._rank.follow()


class RayPeers:
    """`runtime.processes.Peers` over Ray. Connects to the cluster of RAY_ADDRESS, or starts one on this host."""

    def __init__(self, jobs: Sequence[RankJob]) -> None:
        check_ray()
        self._jobs = jobs
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, tuple[int, bool]] = {}  # a call under way -> its rank, and whether it is load
        self._group: Any = None

    def start(self, block_path: str) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=True)
        gpus = 1 if self._jobs[0].backend == "cuda" else 0
        here = {f"node:{_node_address(ray)}": 0.001}
        bundles = [{"CPU": 1, **({"GPU": 1} if gpus else {}), **here} for _ in range(len(self._jobs) + 1)]  # the first is rank 0's
        self._group = placement_group(bundles, strategy="STRICT_PACK")
        if not self._group.wait(PLACE_S):
            raise RuntimeError(f"Ray has not placed {len(bundles)} ranks of {bundles[0]} within {PLACE_S:g} s; resources: {_free(ray)}")
        environment = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        if gpus:  # every rank sees all GPUs: peer memory is opened by device number
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        remote = ray.remote(RankActor)
        for job in self._jobs:
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=job.rank)
            options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": place}
            actor = remote.options(**options, runtime_env={"env_vars": environment}).remote()
            self._actors[job.rank] = actor
            self._waiting[actor.load.remote(dataclasses.replace(job, block=block_path).to_json())] = job.rank, True

    def events(self) -> list[RankEvent]:
        import ray

        if not self._waiting:
            time.sleep(POLL_S)
            return []
        done, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=POLL_S)
        found = []
        for call in done:
            rank, loading = self._waiting.pop(call)
            try:
                ray.get(call)
            except Exception as error:
                found.append(RankEvent(rank, True, f"ended: {_cause(error)}"))
                continue
            found.append(RankEvent(rank, not loading, "" if loading else "stopped"))
            if loading:
                self._waiting[self._actors[rank].follow.remote()] = rank, False
        if not self._waiting:
            self._give_back()
        return found

    def kill(self) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._give_back()

    def _give_back(self) -> None:
        """Forgets the actors, which ends them, and frees their bundles."""
        self._actors = {}
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _node_address(ray: Any) -> str:
    """The address under which Ray knows this host."""
    own = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own))


def _free(ray: Any) -> dict[str, float]:
    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}


def _cause(error: Exception) -> str:
    """The error of the rank itself, in a line, or Ray's about its actor."""
    inner = getattr(error, "cause", None) or error
    lines = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {lines[0]}"
