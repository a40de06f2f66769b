"""Two stages on the CPU shim, a process each, loaded as on GPUs: hidden states handed on inside recorded steps, plans between hosts."""

from __future__ import annotations

import dataclasses
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.tiny import make_tiny
from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.graph.driver import ListDriver
from runtime.kernels_cu import peers_cuda
from runtime.kernels_cu.peer_comm import PeerComm
from runtime.pipeline import CapturedPipeline, StageLives, follow_stage, wait_ready
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from runtime.speculate import TreeSpeculation
from runtime.stage_comm import HostNeighbours, StagePlace, exchange_as_first, exchange_as_other
from runtime.stage_link import Link, accept, connect, listen
from runtime.stages import Elsewhere, Master, blobs_of, stage_job
from runtime.types import SamplingParams
from tests.forks import on_ranks
from tests.plans import make_plan, page_table
from tests.runtime.graph.test_ranks_shim import SIZES, HostCall, HostLarge, bytes_at, generate
from tests.runtime.graph.worlds import tiny_model
from tests.shim_device import ShimDevice

TREES = SpeculativeConfig(method="ddtree")
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=3, logprobs=2)
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


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends, made before the processes part."""
    listener = listen("127.0.0.1")
    ours = connect("127.0.0.1", listener.getsockname()[1], 5.0)
    theirs, _ = accept(listener, lambda: None)
    listener.close()
    return ours, theirs


def texts(path: Path, executor: Any) -> list[Any]:
    found = generate(path, executor, SEEDED, TreeSpeculation(executor, SpeculativeConfig(tree_budget=1)))
    return [(got.tokens, got.logprobs, got.accepted) for got in found.values()]


def test_two_stages_draw_what_one_draws(tmp_path: Path, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: the same kernels on the same rows, hidden states copied as they lie. Pages are those of the smaller stage."""
    path = tiny_model(tmp_path)
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


@pytest.mark.slow
def test_two_stages_of_two_ranks_draw_what_two_ranks_draw(tmp_path: Path, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes: rank r hands on to rank r, sums stay inside a stage, and pages are agreed among all."""
    source = loading.open_source(make_tiny(tmp_path / "model", seed=3, **SIZES), TREES)
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "max_model_len": 64, "block_size": 16}
    config = loading.fit_config(loading.first_config("cuda", [1], **given), source, "bfloat16", "cuda")
    pages = page_table(2, 1)
    plans = [make_plan([[3, 9], [5, 6]], [[-1, 0]] * 2, [0, 0], pages), make_plan([[8, 1, 2], [9]], [[-1, 0, 0], [-1]], [2, 2], pages)]
    plans.append(dataclasses.replace(plans[1], moves=np.array([[19, 18]], np.int32), ctx=np.array([2, 2], np.int32)))

    def draw(blocks: list[SharedBlock], rank: int, place: StagePlace | None) -> Any:
        host = SharedComm(rank % 2, 2, blocks[rank // 2], LINE, Watch(blocks[rank // 2], 0, 60.0))
        monkeypatch.setattr(peers_cuda, "open_peers", lambda ops, *_: PeerComm(ops, rank % 2, 2, HostLarge(host), None))
        driver = Small(ShimDevice(shim))
        driver.free = (1 << 20) - 4096 * rank
        worker = loading.make_gpu_executor(source, config, TREES, LOG.debug, driver, host, place)
        found = [worker.step(plan) for plan in plans]
        return [(r.target.tolist(), r.logp.tolist()) for r in found], worker.limits.num_pages

    def group(count: int) -> list[SharedBlock]:
        return [SharedBlock.create(LINE + SharedComm.nbytes(2)) for _ in range(count)]

    told, columns, blocks = connection(), [connection() for _ in range(2)], group(2)

    def on_rank(rank: int) -> Any:
        stage, own = divmod(rank, 2)
        link, states = (Link(pair[stage], f"stage {1 - stage}", 60.0) for pair in (told, columns[own]))
        exchange = None if own else exchange_as_other(link, 1, 2) if stage else exchange_as_first([link], lambda: None)
        place = StagePlace(stage, 2, 0, exchange, states if stage else None, None if stage else states)
        monkeypatch.setattr(peers_cuda, "open_line", lambda *_: HostLine(HostNeighbours(place, None)))
        return draw(blocks, rank, place)

    stages = on_ranks(4, on_rank, 300.0)
    alone = group(1)
    want, _ = on_ranks(2, lambda rank: draw(alone, rank, None), 300.0)
    assert stages[0][0] == stages[1][0] == [([], [])] * 3
    assert stages[2][0] == stages[3][0] == want[0] and len({each[1] for each in stages}) == 1
