"""Ranks 1 and up as Ray actors: Ray places and starts them and notices their deaths; plans and sums never go through it.

A placement group reserves a bundle for each rank, all on the host where rank 0 runs, for the ranks meet in its memory. A pipeline
has one group with a bundle for each stage, so that a stage's ranks are on one host; where there are as many hosts as stages, on
one each. An actor call takes Ray 3 ms, so it is used to start, to wait and to end. Ray is an extra: pip install
'threshold-runtime[ray]'.

GPU-unverified: on GPUs rank r of the only stage on a host takes its device r, whatever Ray calls it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.lives import RankEvent
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
        """Meets the others and loads this rank's share; the first of a stage has Ray start the rest of it."""
        from runtime.rank import load_rank

        self._rank = load_rank(RankJob.from_json(job), "ray")

    def follow(self) -> None:
        """Executes rank 0's plans until it stops."""
        self._rank.follow()


def join_cluster() -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS or to one that is started on this host."""
    check_ray()
    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=True)
    return ray


def reserve(ray: Any, bundles: Sequence[Mapping[str, float]], strategy: str, name: str = "") -> Any:
    """A placement group, placed. Raises RuntimeError if Ray has no room for it."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy, name=name)
    if not group.wait(PLACE_S):
        remove_placement_group(group)
        what = f"{len(bundles)} {'stages' if name else 'ranks'}"
        raise RuntimeError(f"Ray has not placed {what} of {dict(bundles[0])} ({strategy}) within {PLACE_S:g} s; resources: {_free(ray)}")
    return group


class RayPeers:
    """`runtime.lives.Peers` over Ray. held: a placement group that ends with them; None: they make one, or have places in their
    jobs' group, which is another's."""

    def __init__(self, jobs: Sequence[RankJob], held: Any = None) -> None:
        check_ray()
        self._jobs = jobs
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, tuple[int, bool]] = {}  # a call under way -> its rank, and whether it is load
        self._group: Any = held

    def start(self, block_path: str) -> None:
        ray = join_cluster()
        from ray.util import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus, shared = 1 if self._jobs[0].backend == "cuda" else 0, self._jobs[0].group
        if not shared:
            here = {f"node:{_node_address(ray)}": 0.001}
            # the first bundle is rank 0's
            self._group = reserve(ray, [{"CPU": 1, **({"GPU": 1} if gpus else {}), **here}] * (len(self._jobs) + 1), "STRICT_PACK")
        group = get_placement_group(shared) if shared else self._group
        environment = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        if gpus:  # every rank sees all GPUs: peer memory is opened by device number
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        remote = ray.remote(RankActor)
        for job in self._jobs:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=job.stage if shared else job.rank)
            options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": place}
            actor = remote.options(**options, runtime_env={"env_vars": environment}).remote()
            self._actors[job.number] = actor
            self._waiting[actor.load.remote(dataclasses.replace(job, block=block_path).to_json())] = job.number, True

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


class RayStages:
    """Room in a Ray cluster for the stages of a pipeline, `tp` ranks each; the first is this host's.

    address: of this host; name: of the placement group; devices: the number of each stage's first GPU on its host.
    """

    def __init__(self, stages: int, tp: int, backend: str) -> None:
        ray = join_cluster()
        from ray.util.placement_group import placement_group_table

        self.address, self.name = _node_address(ray), f"stages-{secrets.token_hex(8)}"
        bundles: list[dict[str, float]] = [{"CPU": tp, **({"GPU": tp} if backend == "cuda" else {})} for _ in range(stages)]
        bundles[0][f"node:{self.address}"] = 0.001
        hosts = sum(bool(node["Alive"]) for node in ray.nodes())
        self._group = reserve(ray, bundles, "STRICT_SPREAD" if hosts >= stages else "PACK", self.name)
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self.devices, seen = [0] * stages, Counter[str]()
        for stage in range(stages):
            self.devices[stage] = tp * seen[nodes[stage]]
            seen[nodes[stage]] += 1

    def peers(self, jobs: Sequence[RankJob]) -> RayPeers:
        """The first ranks of the other stages; the group ends with them."""
        return RayPeers(jobs, self._group)

    def give_back(self) -> None:
        """Frees the room, where nobody came to use it."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


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
