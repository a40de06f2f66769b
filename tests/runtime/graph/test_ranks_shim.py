"""Two GPU ranks on the CPU shim, a process each: sums through peer memory inside recorded steps, logits gathered, equal tokens."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from model.tiny import make_tiny
from model.tokenizer import Tokenizer
from model.weights import Checkpoint
from runtime.comm import SoloComm
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_worker import CudaWorker
from runtime.engine import Engine
from runtime.graph.driver import ListDriver
from runtime.kernels_cu import sample_ranks
from runtime.kernels_cu.all_reduce import Config, Ranks
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.peer_comm import PeerComm, PeerMemory, Thresholds
from runtime.kernels_cu.sample_ranks import Seat
from runtime.kernels_np import NumpyBackend
from runtime.loading import plan_layout
from runtime.shared import LINE, SharedBlock, Watch
from runtime.shared_comm import SharedComm
from runtime.speculate import NoSpeculation, Speculator, TreeSpeculation
from runtime.stream import TextStream
from runtime.types import DraftPlan, Request, SamplingParams
from runtime.worker import Limits, Worker
from tests.forks import on_ranks
from tests.shim_device import ShimDevice
from tests.worlds import Got, run

WORLD, HIDDEN, VOCAB, PAGE, LENGTH, LAYERS = 2, 64, 512, 16, 64, 2
SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "q_lora_rank": 32, "intermediate_size": 64, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "draft_num_hidden_layers": 1, "draft_num_attention_heads": 4, "draft_num_key_value_heads": 2, "draft_intermediate_size": 64,
    "draft_block_size": 4,
}  # fmt: skip
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=4, max_model_len=LENGTH, block_size=PAGE, num_pages=16, buckets=(1, 4))
LIMITS = Limits(VOCAB, 4, 16, PAGE, LENGTH)
DRAFTING = dataclasses.replace(LIMITS, draft_depth=3, draft_top_k=4)
PEERS = Config(WORLD, threads=32, vecs=1, blocks=8, rows=8)
DRAWING = sample_ranks.Config(WORLD, threads=64, blocks=3)  # fewer blocks than rows of the larger step: its gathers go the large way
GAP = 0.05  # of two log-probabilities; logits here differ from the definition's by up to 0.02 (bfloat16 in another order)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, presence_penalty=0.5, max_tokens=6, logprobs=2)


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@dataclass(frozen=True)
class HostCall:
    call: Callable[[], Any]

    def run(self, stream: int) -> None:
        self.call()


@dataclass(frozen=True)
class HostLarge:
    """NCCL's part, by the host."""

    host: SharedComm

    def all_reduce(self, address: int, count: int) -> HostCall:
        return HostCall(lambda: self.host.all_reduce(bytes_at(address, 2 * count).view(ml_dtypes.bfloat16)))

    def all_gather(self, source: int, to: int, nbytes: int) -> HostCall:
        def gather() -> None:
            bytes_at(to, WORLD * nbytes)[:] = np.frombuffer(b"".join(self.host.gather_bytes(bytes_at(source, nbytes).tobytes())), np.uint8)

        return HostCall(gather)


class Group:
    """What ranks share, made before they part."""

    def __init__(self, together: bool = True, cut: bool = False) -> None:
        self.together, self.cut = together, cut  # draw from shares; q_a and kv_a are cut
        self.drawing = [SharedBlock.create(DRAWING.region_bytes()) for _ in range(WORLD)]
        self.block = SharedBlock.create(LINE + SharedComm.nbytes(WORLD))
        self.regions = [SharedBlock.create(PEERS.region_bytes(HIDDEN)) for _ in range(WORLD)]

    def worker(self, path: Path, shim: Any, rank: int, thresholds: Thresholds, limits: Limits = LIMITS) -> CudaWorker:
        backend = CudaBackend(ShimDevice(shim))
        host = SharedComm(rank, WORLD, self.block, LINE, Watch(self.block, 0, 60.0))
        state = backend.device.alloc(PEERS.state_bytes())
        told = backend.device.alloc(4)
        regions = [int(region.array(0, 1).ctypes.data) for region in self.regions]
        notes, places = backend.device.alloc(DRAWING.state_bytes()), [int(block.array(0, 1).ctypes.data) for block in self.drawing]
        seat = Seat(DRAWING, Ranks(rank, places, notes, told, spins=20_000_000))
        memory = PeerMemory(PEERS, Ranks(rank, regions, state, told, spins=20_000_000), HIDDEN, None, seat if self.together else None)
        comm = PeerComm(backend, rank, WORLD, HostLarge(host), memory, thresholds)
        model, layout = bind(path, backend, rank, WORLD, limits.draft_depth > 0, self.cut), plan_layout(CONFIG, limits)
        return CudaWorker(ListDriver(backend.device), backend, comm, model, limits, layout, (1, 4))


def bind(path: Path, backend: Any, rank: int, world: int, drafter: bool = False, cut: bool = False) -> BoundModel:
    ckpt = Checkpoint.open(path)
    config = dataclasses.replace(kimi_k26.Config.from_json(ckpt.config), cut_latent=cut)
    weights = kimi_k26.load(ckpt, config, backend, rank, world, LENGTH + 4)
    cache, own = backend.zeros((config.layers, 16 * PAGE, config.cache_width)), None
    if drafter:
        there = Checkpoint.open(path / "drafter")
        c = dflash.Config.from_json(there.config)
        part = c.part(world)
        own = Drafter(part, dflash.load(there, c, backend, LENGTH + 4, None, rank, world), dflash.make_cache(backend, part, 16 * PAGE))
    return BoundModel(config, weights, cache, PAGE, LENGTH + 3, own)


def generate(path: Path, executor: Any, params: SamplingParams, speculator: Speculator | None = None) -> dict[str, Got]:
    tokenizer = Tokenizer.load(path)

    def stream(wanted: SamplingParams) -> TextStream:
        return TextStream(tokenizer.stream(wanted.skip_special_tokens), wanted, tokenizer.eos_ids)

    engine = Engine(executor, CONFIG, stream, speculator or NoSpeculation(), eos_ids=tokenizer.eos_ids)
    prompts = [[3, 9, 17, 4], [4, 9, 17, 4, 22, 8, 90], [5, 77]]
    return run(engine, [Request(str(i), np.array(p, np.int32), params, seed=5 + i) for i, p in enumerate(prompts)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ranks") / "model", seed=3, **SIZES)


@pytest.mark.parametrize(
    ("thresholds", "params", "together", "cut"),
    [(Thresholds(1, 4), GREEDY, True, True), (Thresholds(4, 4), SEEDED, True, False), (Thresholds(0, 0), GREEDY, False, True)],
)
def test_two_ranks_draw_what_one_draws(
    path: Path, shim: Any, thresholds: Thresholds, params: SamplingParams, together: bool, cut: bool
) -> None:
    """One shot, two shots and the host's sums, draws from shares and from gathered logits, inside steps of 1 and 4 rows; every rank
    schedules for itself here."""
    Group(together, cut).worker(path, shim, 0, thresholds)  # compiles all that the ranks need
    group = Group(together, cut)

    def on_rank(rank: int) -> list[tuple[Any, ...]]:
        worker = group.worker(path, shim, rank, thresholds)
        ops = {record.op for program in worker.programs() for record in program.records}
        assert ("all_reduce_norm" in ops) == (thresholds.two > 0) and {"all_reduce", "sample"} <= ops
        gathers = sum(record.op == "all_gather" for record in list(worker.programs())[-1].records)
        assert gathers == (LAYERS * cut if together else 2 * LAYERS * cut + 2), "logits are gathered only where nobody draws together"
        return [(got.tokens, got.logprobs) for got in generate(path, worker, params).values()]

    first, second = on_ranks(WORLD, on_rank, 300.0)
    assert first == second, "all ranks hold the same bits"
    oracle = NumpyBackend("bfloat16")
    truth = generate(path, Worker(oracle, SoloComm(), bind(path, oracle, 0, 1), LIMITS), params)
    compared = 0
    for (tokens, _), want in zip(first, truth.values(), strict=True):
        for place, (mine, theirs) in enumerate(zip(tokens, want.tokens, strict=True)):
            if mine != theirs:
                best, other = want.logprobs[place].rank_logprobs
                assert params is GREEDY and best - other < GAP
                break
            compared += 1
    assert compared >= 12


def test_shares_draw_what_gathered_logits_draw(path: Path, shim: Any) -> None:
    """The same tokens and alternatives, bit for bit; log-probabilities up to the order of a sum."""
    found = []
    for together in (True, False):
        group = Group(together)
        results = on_ranks(WORLD, lambda rank, group=group: generate(path, group.worker(path, shim, rank, Thresholds(4, 4)), SEEDED), 300.0)  # type: ignore[misc]
        found.append(list(results[0].values()))
    for mine, theirs in zip(*found, strict=True):
        assert mine.tokens == theirs.tokens and [p.rank_ids for p in mine.logprobs] == [p.rank_ids for p in theirs.logprobs]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < 1e-5


def test_two_ranks_draft_together(path: Path, shim: Any) -> None:
    """The drafter is cut by heads and width, its likeliest tokens are merged over ranks, and both ranks end with the same tokens."""
    Group().worker(path, shim, 0, Thresholds(4, 4), DRAFTING)
    group = Group()

    def on_rank(rank: int) -> list[Any]:
        worker = group.worker(path, shim, rank, Thresholds(4, 4), DRAFTING)
        assert {"top_merge", "all_reduce_norm"} <= {
            r.op for program in worker.programs() if program.kind == "block" for r in program.records
        }
        got = generate(path, worker, GREEDY, TreeSpeculation(worker, SpeculativeConfig(tree_budget=1)))
        root = DraftPlan(*(np.array(a, np.int32) for a in ([9], [0], [[1]], [], [], [])))
        drafted = worker.draft(root)
        return [*((g.tokens, g.steps) for g in got.values()), drafted.ids.tolist(), drafted.logp.tolist()]

    first, second = on_ranks(WORLD, on_rank, 300.0)
    assert first == second
    oracle = NumpyBackend("bfloat16")
    truth = Worker(oracle, SoloComm(), bind(path, oracle, 0, 1, drafter=True), DRAFTING).draft(
        DraftPlan(*(np.array(a, np.int32) for a in ([9], [0], [[1]], [], [], [])))
    )
    assert np.abs(np.array(first[-1]) - truth.logp).max() < GAP
    close = np.array(first[-2]) == truth.ids
    assert close.mean() > 0.7, "near ties may change places"
