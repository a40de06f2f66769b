"""A model over several hosts: who starts the stages, how they find each other, what they must agree on.

Stage 0 listens; the first rank of every other stage, its leader, calls, proves that it knows the launch's token, and says what it
was told to load. On a CPU each leader then calls the next one, for hidden states. Lives beside `runtime.loading` at the top.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.stages import stages_of
from runtime import __version__, loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.executor import Executor
from runtime.lives import RankEvent, RankFailed
from runtime.pipeline import Blobs, CapturedPipeline, Pipeline, StageLives, follow_stage, wait_ready
from runtime.ray_ranks import RayStages
from runtime.spawn import RankJob, SpawnedPeers
from runtime.stage_comm import StagePlace, exchange_as_first, exchange_as_other
from runtime.stage_hello import StageDiffers, answer, call, differences
from runtime.stage_link import Link, StageLost, accept, connect, listen
from runtime.stage_records import NEXT

LOG = logging.getLogger(__name__)
JOIN_S = 600.0  # that stages which others start have to call
CALL_S = 60.0  # that a stage waits for stage 0's, or the next one's, port
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Master:
    """Where stage 0 listens for stages that somebody else starts, and the secret that they share."""

    host: str
    port: int
    token: str

    @staticmethod
    def parse(address: str, token: str | None) -> Master:
        """Raises ValueError for what is no HOST:PORT, or where there is no token."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"master_addr: {address!r} is not HOST:PORT")
        if not token:
            raise ValueError("RUNTIME_STAGE_TOKEN is not set; give the same secret to every node of this model")
        return Master(host.strip("[]"), int(port), token)


class Elsewhere:
    """`runtime.lives.Peers` that somebody else starts and ends: what is known of them are their links."""

    def __init__(self) -> None:
        self.lives: StageLives | None = None
        self._gone: set[int] = set()

    def start(self, block_path: str) -> None:
        return None

    def events(self) -> list[RankEvent]:
        time.sleep(0.2)
        links = self.lives.links if self.lives else []
        lost = {stage: why for stage, link in enumerate(links, 1) if stage not in self._gone and (why := link.lost()) is not None}
        self._gone |= set(lost)
        return [RankEvent(stage, True, f"is lost: {why}") for stage, why in lost.items()]

    def kill(self) -> None:
        """Their links are closed, which ends them; there is nothing more to wait for."""
        raise RankFailed("stages on other hosts were left to themselves")


def make_executor(
    source: loading.Source,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    activations: str,
    tp: int,
    progress: Callable[[str], None] = lambda _: None,
    backend: str = "numpy",
    distributed: str = "local",
    stages: int = 1,
    master: Master | None = None,
) -> Executor:
    """Loads a model over `stages` groups of `tp` ranks and returns what runs plans; this process is rank 0 of stage 0.

    The others are started by `distributed`, or by somebody else if there is a `master` address. Raises ValueError for sizes that do
    not cut the model, StageRefused and RankFailed with the cause if a stage can not be had.
    """
    source.target.check_tp(tp)
    parts = stages_of(source.target.layers, stages, source.drafter is not None)
    if stages == 1:
        return loading.make_executor(source, config, speculative, activations, tp, progress, backend, distributed)
    ray = RayStages(stages, tp, backend) if distributed == "ray" else None
    at = master or Master(ray.address if ray else LOOPBACK, 0, secrets.token_hex(32))
    try:
        listener = listen(at.host, at.port)
    except OSError as error:
        if ray:
            ray.give_back()
        raise ValueError(f"master_addr: {at.host}:{at.port} is no address where this host can listen: {error}") from None
    name, (host, port) = ray.name if ray else "", listener.getsockname()[:2]
    to, devices = Master(host, port, at.token), ray.devices if ray else [tp * stage for stage in range(stages)]
    places = [StagePlace(stage, stages, device) for stage, device in enumerate(devices)]
    jobs = [stage_job(source, config, speculative, activations, backend, tp, place, to, name) for place in places]
    elsewhere = Elsewhere()
    lives = StageLives(elsewhere if master else ray.peers(jobs[1:]) if ray else SpawnedPeers(jobs[1:]), stages)
    elsewhere.lives, own = lives, None
    try:
        told = what_is_told(source, jobs[0])
        hellos = _meet(listener, stages, at.token, told, config.step_deadline_s, lives)
        after = _chain(lives, hellos, at.token, config.step_deadline_s) if backend == "numpy" else None
        place = StagePlace(0, stages, jobs[0].device, exchange_as_first(lives.links, lives.check), None, after, lives.lost)
        own = loading.make_executor(source, config, speculative, activations, tp, progress, backend, distributed, place, name)
        wait_ready(lives.links, lives.check)
    except BaseException as error:
        lives.settle(0.5 if isinstance(error, StageLost) else 0.0)
        lives.fail(str(error))
        if own is not None:
            own.close()
        if isinstance(error, StageLost):
            raise RankFailed(lives.story) from error
        raise
    finally:
        listener.close()
    experts = [sum(layer >= source.target.dense_layers for layer in part.layers) for part in parts]
    made = CapturedPipeline if backend == "cuda" else Pipeline
    return made(own, lives, blobs_of(source, jobs[0]), experts, source.drafter.depth if source.drafter else 0)


def what_is_told(source: loading.Source, job: RankJob) -> dict[str, Any]:
    """What must be equal at every stage, as JSON has it. The model is known by its configs, not by its folder."""
    configs = repr((source.target, source.drafter))
    speculative = {f"speculative_config.{key}": value for key, value in dataclasses.asdict(job.speculative).items() if key != "model"}
    given = {
        "version": __version__,
        "model": hashlib.sha256(configs.encode()).hexdigest()[:16],
        "load_format": job.weights.load_format,
        "tensor_parallel_size": job.world,
        "pipeline_parallel_size": job.stages,
        "backend": job.backend,
        "activations": job.activations,
        **dataclasses.asdict(job.config),
        **speculative,
    }
    told: dict[str, Any] = json.loads(json.dumps(given))
    return told


def blobs_of(source: loading.Source, job: RankJob) -> Blobs:
    meeting = loading.meeting_of(source, job.config, job.speculative, job.backend, 1)
    return Blobs.of(meeting.plan, meeting.draft)


class StageLeader:
    """The first rank of a stage above 0: calls stage 0, loads with the other ranks of its host, follows.

    Raises StageRefused where it differs from stage 0, StageLost if that is gone, and what loading raises, which stage 0 is told.
    """

    def __init__(self, job: RankJob, distributed: str = "local") -> None:
        source = loading.open_source(job.model, job.speculative, job.weights)
        sock = connect(job.host, job.port, CALL_S)
        host = sock.getsockname()[0]
        listener = listen(host)
        deadline_s, told = job.config.step_deadline_s, what_is_told(source, job)
        hello = {"stage": job.stage, "host": host, "port": listener.getsockname()[1], "told": told}
        try:
            self._link = call(sock, "stage 0", job.token, hello, deadline_s)
            before, after = _neighbours(self._link, job, listener) if job.backend == "numpy" else (None, None)
        finally:
            listener.close()
        exchange = exchange_as_other(self._link, job.stage, job.stages)
        place = StagePlace(job.stage, job.stages, job.device, exchange, before, after, self._link.lost)
        parts = (job.activations, job.world, lambda _: None, job.backend, distributed, place, job.group)
        try:
            self._executor = loading.make_executor(source, job.config, job.speculative, *parts)
        except Exception as error:
            self._link.fail(f"{type(error).__name__}: {error}")
            raise
        self._blobs = blobs_of(source, job)

    def follow(self) -> None:
        """Executes stage 0's plans until it says stop."""
        try:
            follow_stage(self._executor, self._link, self._blobs)
        finally:
            self._executor.close()
            self._link.close()


def _meet(
    listener: socket.socket, stages: int, token: str, told: Mapping[str, Any], deadline_s: float, lives: StageLives
) -> list[Mapping[str, Any]]:
    """Takes the calls of all stages, in any order, and puts their links into lives; their hellos, in order."""
    found: dict[int, tuple[Link, Mapping[str, Any]]] = {}
    limit_s = time.monotonic() + JOIN_S

    def check() -> None:
        lives.check()
        if time.monotonic() > limit_s:
            missing = [stage for stage in range(1, stages) if stage not in found]
            raise RankFailed(f"stages {missing} have not called {listener.getsockname()[:2]} within {JOIN_S:g} s")

    def judge(hello: Mapping[str, Any]) -> str | None:
        stage = hello.get("stage")
        if not isinstance(stage, int) or not 0 < stage < stages or stage in found:
            return f"stage {stage} is not awaited; {[s for s in range(1, stages) if s not in found]} are"
        theirs = hello.get("told")
        return differences(told, theirs if isinstance(theirs, dict) else {}, f"stage {stage}")

    while len(found) < stages - 1:
        sock, address = accept(listener, check)
        try:
            link, hello = answer(sock, f"who calls from {address}", token, judge, deadline_s)
        except StageDiffers:
            raise
        except (StageLost, ValueError) as error:  # whoever finds this port
            LOG.warning("a call from %s is not taken: %s", address, error)
            continue
        link.name = f"stage {hello['stage']}"
        found[hello["stage"]] = link, hello
    lives.links += [found[stage][0] for stage in range(1, stages)]
    return [found[stage][1] for stage in range(1, stages)]


def _chain(lives: StageLives, hellos: Sequence[Mapping[str, Any]], token: str, deadline_s: float) -> Link:
    """Tells each leader where the next one listens; the link on which stage 0 hands hidden states to stage 1."""
    addresses = [{"host": hello["host"], "port": hello["port"]} for hello in hellos]
    for link, following in zip(lives.links, [*addresses[1:], {}], strict=True):
        link.send(NEXT, json.dumps(following).encode())
    after = _call_next(addresses[0], 0, token, deadline_s)
    lives.more.append(after)
    return after


def _neighbours(link: Link, job: RankJob, listener: socket.socket) -> tuple[Link, Link | None]:
    """Links to the stages before and after; the later one first, so that a chain of calls resolves from its end."""
    link.expect(NEXT, lambda: None)
    following, deadline_s = json.loads(link.read_bytes()), job.config.step_deadline_s
    after = _call_next(following, job.stage, job.token, deadline_s) if following else None

    def check() -> None:
        if (why := link.lost()) is not None:
            raise StageLost(why)

    def judge(hello: Mapping[str, Any]) -> str | None:
        return None if hello.get("stage") == job.stage - 1 else f"stage {hello.get('stage')} is not the one before {job.stage}"

    while True:
        sock, address = accept(listener, check)
        try:
            before, _ = answer(sock, f"stage {job.stage - 1}", job.token, judge, deadline_s)
        except (StageLost, ValueError) as error:
            LOG.warning("a call from %s is not taken: %s", address, error)
            continue
        return before, after


def _call_next(address: Mapping[str, Any], own: int, token: str, deadline_s: float) -> Link:
    sock = connect(address["host"], address["port"], CALL_S)
    return call(sock, f"stage {own + 1}", token, {"stage": own}, deadline_s)


def stage_job(
    source: loading.Source,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    activations: str,
    backend: str,
    tp: int,
    place: StagePlace,
    master: Master,
    group: str = "",
) -> RankJob:
    """What the leader of a stage has to do."""
    job = loading.rank_job(source, config, speculative, activations, backend, 0, tp, place, group)
    return dataclasses.replace(job, host=master.host, port=master.port, token=master.token)
