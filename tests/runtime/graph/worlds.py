"""A tiny model behind two executors: the definition in bfloat16, and the CUDA worker over the CPU shim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.bound import BoundModel
from model.tiny import make_tiny
from model.tokenizer import Tokenizer
from runtime.comm import SoloComm
from runtime.config import EngineConfig
from runtime.cuda_worker import CudaWorker
from runtime.engine import Engine
from runtime.graph.driver import Driver, ListDriver
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.tree_paths import PathPages
from runtime.kernels_np import NumpyBackend
from runtime.loading import plan_layout
from runtime.speculate import Speculator
from runtime.stream import TextStream
from runtime.types import SamplingParams
from runtime.worker import Limits, Worker
from tests.shim_device import ShimDevice
from tests.twin import bind
from tests.worlds import Got

SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "q_lora_rank": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
    "n_routed_experts": 16, "vocab_size": 512, "max_position_embeddings": 128, "draft_num_hidden_layers": 1, "draft_num_attention_heads": 2,
    "draft_num_key_value_heads": 1, "draft_intermediate_size": 64, "draft_block_size": 4,
}  # fmt: skip
VOCAB, DEPTH, PAGE = SIZES["vocab_size"], SIZES["draft_block_size"] - 1, 16


def bits_of(got: Mapping[str, Got]) -> dict[str, list[tuple[Any, ...]]]:
    """What was said for each request, log-probabilities included: floats compare by their bits here, for none is NaN or -0."""
    return {key: [(t.token, t.logprob, t.rank_ids, t.rank_logprobs) for t in one.logprobs] for key, one in got.items()}


def tiny_model(folder: Path) -> Path:
    return make_tiny(folder / "model", seed=3, **SIZES)


@dataclass
class Pair:
    """Both executors over one checkpoint, and engines over either."""

    path: Path
    shim: Any
    rows: int = 12
    seqs: int = 3
    pages: int = 24
    length: int = 64
    sizes: tuple[int, ...] = (1, 4, 12)
    invariant: bool = False
    paths: PathPages | None = None
    drivers: Any = ListDriver
    config: EngineConfig = field(init=False)
    limits: Limits = field(init=False)
    cuda: CudaWorker = field(init=False)
    truth: Worker = field(init=False)
    model: BoundModel = field(init=False)

    def __post_init__(self) -> None:
        common = {"max_num_seqs": self.seqs, "max_num_batched_tokens": self.rows, "max_model_len": self.length}
        self.config = EngineConfig(**common, block_size=PAGE, num_pages=self.pages, buckets=self.sizes)
        self.limits = Limits(VOCAB, self.rows, self.pages, PAGE, self.length, DEPTH, 4)
        self.tokenizer = Tokenizer.load(self.path)
        backend, oracle = CudaBackend(ShimDevice(self.shim), self.invariant), NumpyBackend("bfloat16")
        driver: Driver = self.drivers(backend.device)
        there = (self.length + self.rows, self.pages, PAGE)
        layout = plan_layout(self.config, self.limits)
        self.truth = Worker(oracle, SoloComm(), bind(self.path, oracle, *there), self.limits)
        self.model = bind(self.path, backend, *there, self.paths)
        self.cuda = CudaWorker(driver, backend, SoloComm(), self.model, self.limits, layout, self.sizes)

    def engine(self, executor: Any, speculator: Speculator, **changes: Any) -> Engine:
        def stream(params: SamplingParams) -> TextStream:
            return TextStream(self.tokenizer.stream(params.skip_special_tokens), params, self.tokenizer.eos_ids)

        return Engine(executor, self.config.replace(**changes), stream, speculator, eos_ids=self.tokenizer.eos_ids)
