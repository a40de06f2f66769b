"""Two stages on the CPU shim, a process each: hidden states handed on inside recorded steps, plans and results between hosts."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.stages import stages_of
from model.tiny import make_tiny
from model.weights import Checkpoint
from runtime.comm import SoloComm
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_worker import CudaWorker
from runtime.graph.driver import ListDriver
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.stage_peers import DeviceNeighbours
from runtime.loading import plan_layout
from runtime.pipeline import Blobs, CapturedPipeline, StageLives, follow_stage, wait_ready
from runtime.plan import DraftLayout
from runtime.speculate import NoSpeculation, TreeSpeculation
from runtime.stage_comm import HostNeighbours, StagePlace
from runtime.stage_link import Link, accept, connect, listen
from runtime.stages import Elsewhere
from runtime.types import SamplingParams
from runtime.worker import Limits
from tests.forks import on_ranks
from tests.runtime.graph.test_ranks_shim import SIZES, HostCall, bytes_at, generate
from tests.shim_device import ShimDevice

PAGE, LENGTH = 16, 64
LIMITS = Limits(SIZES["vocab_size"], 4, 16, PAGE, LENGTH, draft_depth=3, draft_top_k=4)
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=4, max_model_len=LENGTH, block_size=PAGE, num_pages=16, buckets=(1, 4))
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=2, logprobs=2)


@dataclass(frozen=True)
class HostLine:
    """NCCL's part, by the host."""

    near: HostNeighbours

    def receive(self, address: int, nbytes: int) -> HostCall:
        return HostCall(lambda: self.near.receive(bytes_at(address, nbytes)))

    def send(self, address: int, nbytes: int) -> HostCall:
        return HostCall(lambda: self.near.send(bytes_at(address, nbytes)))


def worker(path: Path, shim: Any, number: int, count: int, near: HostNeighbours | None) -> CudaWorker:
    """One stage: its layers, and on the last the drafter."""
    backend = CudaBackend(ShimDevice(shim))
    target, drafted = Checkpoint.open(path), Checkpoint.open(path / "drafter")
    c, d = kimi_k26.Config.from_json(target.config), dflash.Config.from_json(drafted.config)
    stage = stages_of(c.layers, count, drafts=True)[number]
    weights = kimi_k26.load(target, c, backend, 0, 1, LENGTH + 4, stage=stage)
    cache, drafter = backend.zeros((len(weights.layers), 16 * PAGE, c.cache_width)), None
    if stage.heads:
        drafter = Drafter(d, dflash.load(drafted, d, backend, LENGTH + 4), dflash.make_cache(backend, d, 16 * PAGE))
    handing = DeviceNeighbours(backend, HostLine(near)) if near else None
    model = BoundModel(c, weights, cache, PAGE, LENGTH + 3, drafter, handing, d.taps)
    limits = LIMITS if stage.heads else dataclasses.replace(LIMITS, draft_depth=0)
    return CudaWorker(ListDriver(backend.device), backend, SoloComm(), model, limits, plan_layout(CONFIG, limits), (1, 4))


def texts(path: Path, executor: Any) -> list[Any]:
    trees = generate(path, executor, GREEDY, TreeSpeculation(executor, SpeculativeConfig(tree_budget=1)))
    seeded = generate(path, executor, SEEDED, NoSpeculation())
    return [(got.tokens, got.logprobs, got.accepted) for got in (*trees.values(), *seeded.values())]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("stages") / "model", seed=3, **SIZES)


def test_two_stages_draw_what_one_draws(path: Path, shim: Any) -> None:
    """To the bit: the same kernels on the same rows, hidden states copied as they lie. Every size is captured on both."""
    whole = worker(path, shim, 0, 1, None)
    want = texts(path, whole)
    plans, states = connection(), connection()
    layout = plan_layout(CONFIG, LIMITS)
    blobs = Blobs.of(layout, DraftLayout(layout.max_seqs, layout.max_pages, layout.max_rows))

    def on_stage(number: int) -> Any:
        told, handed = (Link(pair[number], f"stage {1 - number}", 60.0) for pair in (plans, states))
        place = StagePlace(number, 2, before=handed if number else None, after=None if number else handed)
        own = worker(path, shim, number, 2, HostNeighbours(place, None))
        ops = [{record.op for record in program.records} for program in own.programs() if program.kind == "step"]
        assert all(("send" in found, "receive" in found, "sample" in found) == (not number, bool(number), bool(number)) for found in ops)
        if number:
            follow_stage(own, told, blobs)
            return told.close()
        peers = Elsewhere()
        lives = StageLives(peers, 2)
        peers.lives, lives.links = lives, [told]
        wait_ready(lives.links, lives.check)
        pipeline = CapturedPipeline(own, lives, blobs, [1, 1], LIMITS.draft_depth)
        assert pipeline.limits.draft_depth == 3
        found = texts(path, pipeline), pipeline.capture([1])
        pipeline.close()
        return found

    (got, captured), _ = on_ranks(2, on_stage, 300.0)
    assert got == want and captured > 0


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends, made before the processes part."""
    listener = listen("127.0.0.1")
    ours = connect("127.0.0.1", listener.getsockname()[1], 5.0)
    theirs, _ = accept(listener, lambda: None)
    listener.close()
    return ours, theirs
