"""Two stages on the CPU shim, a process each, loaded as on GPUs: hidden states handed on inside recorded steps, plans between hosts."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model.tiny import make_tiny
from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.graph.driver import ListDriver
from runtime.kernels_cu import peers_cuda
from runtime.pipeline import CapturedPipeline, StageLives, follow_stage, wait_ready
from runtime.speculate import NoSpeculation, TreeSpeculation
from runtime.stage_comm import HostNeighbours, StagePlace, exchange_as_first, exchange_as_other
from runtime.stage_link import Link, accept, connect, listen
from runtime.stages import Elsewhere, Master, blobs_of, stage_job
from runtime.types import SamplingParams
from tests.forks import on_ranks
from tests.runtime.graph.test_ranks_shim import SIZES, HostCall, bytes_at, generate
from tests.shim_device import ShimDevice

TREES = SpeculativeConfig(method="ddtree")
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=2, logprobs=2)
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostLine:
    """NCCL's part, by the host."""

    near: HostNeighbours

    def receive(self, address: int, nbytes: int) -> HostCall:
        return HostCall(lambda: self.near.receive(bytes_at(address, nbytes)))

    def send(self, address: int, nbytes: int) -> HostCall:
        return HostCall(lambda: self.near.send(bytes_at(address, nbytes)))

    def failure(self) -> str | None:
        return None


class Small(ListDriver):
    """A device with so much free memory, in bytes."""

    free = 0
    peers: Any = None

    def free_bytes(self) -> tuple[int, int]:
        return self.free, self.free


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("stages") / "model", seed=3, **SIZES)


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends, made before the processes part."""
    listener = listen("127.0.0.1")
    ours = connect("127.0.0.1", listener.getsockname()[1], 5.0)
    theirs, _ = accept(listener, lambda: None)
    listener.close()
    return ours, theirs


def texts(path: Path, executor: Any) -> list[Any]:
    trees = generate(path, executor, GREEDY, TreeSpeculation(executor, SpeculativeConfig(tree_budget=1)))
    seeded = generate(path, executor, SEEDED, NoSpeculation())
    return [(got.tokens, got.logprobs, got.accepted) for got in (*trees.values(), *seeded.values())]


def test_two_stages_draw_what_one_draws(path: Path, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: the same kernels on the same rows, hidden states copied as they lie. Pages are those of the smaller stage."""
    source = loading.open_source(path, TREES)
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "max_model_len": 64, "block_size": 16}
    config = loading.fit_config(loading.first_config("cuda", [1], **given), source, "bfloat16", "cuda")
    plans, states = connection(), connection()
    last = loading.stage_of(source, StagePlace(1, 2))
    sixteen = int(16.5 * 16 * loading.bytes_per_token(source, 2, 1, last) / config.gpu_memory_utilization)

    def load(free: int, place: StagePlace | None = None) -> Any:
        driver = Small(ShimDevice(shim))
        driver.free = free
        return loading.make_gpu_executor(source, config, TREES, LOG.debug, driver, place=place)

    def on_stage(number: int) -> Any:
        told, handed = (Link(pair[number], f"stage {1 - number}", 60.0) for pair in (plans, states))
        exchange = exchange_as_other(told, 1, 2) if number else exchange_as_first([told], lambda: None)
        place = StagePlace(number, 2, 0, exchange, handed if number else None, None if number else handed, told.lost)
        monkeypatch.setattr(peers_cuda, "open_line", lambda *_: HostLine(HostNeighbours(place, None)))
        own = load([1 << 20, sixteen][number], place)
        ops = [{record.op for record in program.records} for program in own.programs() if program.kind == "step"]
        assert all(("send" in found, "receive" in found, "sample" in found) == (not number, bool(number), bool(number)) for found in ops)
        assert all(program.captured for program in own.programs())
        blobs = blobs_of(source, stage_job(source, config, TREES, "bfloat16", "cuda", 1, place, Master("", 1, "")))
        if number:
            follow_stage(own, told, blobs)
            told.close()
            return own.limits.num_pages
        peers = Elsewhere()
        lives = StageLives(peers, 2)
        peers.lives, lives.links = lives, [told]
        wait_ready(lives.links, lives.check)
        pipeline = CapturedPipeline(own, lives, blobs, [1, 1], source.drafter.depth if source.drafter else 0)
        assert (own.limits.draft_depth, pipeline.limits.draft_depth) == (0, 3)
        found = texts(path, pipeline), pipeline.capture([1]), own.limits.num_pages
        pipeline.close()
        assert own.driver.peers() is not None, "a step would not wait for a stage that is gone"
        return found

    (got, captured, pages), theirs = on_ranks(2, on_stage, 300.0)
    assert captured > 0 and pages == theirs == 16
    assert got == texts(path, load(1 << 20))
