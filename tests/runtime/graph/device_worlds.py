"""The demo model on a GPU, for tests and for the record of invariance: workers, engines, prompts, bits of a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from runtime import loading
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.cuda_worker import CudaWorker
from runtime.engine import Engine
from runtime.graph.programs import Program
from runtime.speculate import Speculator
from runtime.stream import TextStream
from runtime.types import Request, SamplingParams
from tests.worlds import ROOT

SIZES = (1, 2, 8, 16, 24, 64, 128, 256, 1024)


@dataclass(frozen=True)
class DeviceWorld:
    """A worker that has captured its sizes, and engines over it."""

    worker: CudaWorker
    config: EngineConfig
    tokenizer: Tokenizer
    path: object

    def engine(self, speculator: Speculator, **changes: object) -> Engine:
        def stream(params: SamplingParams) -> TextStream:
            return TextStream(self.tokenizer.stream(params.skip_special_tokens), params, self.tokenizer.eos_ids)

        return Engine(self.worker, self.config.replace(**changes), stream, speculator, eos_ids=self.tokenizer.eos_ids)

    def prompts(self, count: int) -> list[list[int]]:
        """Questions in the chat format, then beginnings of answers."""
        held_out = json.loads((ROOT / "tests" / "fixtures" / "heldout_prompts.json").read_text(encoding="utf-8"))
        template = ChatTemplate.load(self.path, self.tokenizer)
        chats = [template.encode([{"role": "user", "content": item["q"]}], thinking=False) for item in held_out]
        texts = [self.tokenizer.encode(item["a"])[:24] for item in held_out]
        return [*chats[: count // 2], *texts[: count - count // 2]]


def open_world(sizes: Sequence[int] = SIZES, **changes: object) -> DeviceWorld:
    """The demo model and its drafter on the first GPU."""
    speculative = SpeculativeConfig(method="ddtree")
    source = loading.open_source("demo", speculative)
    given = {"max_num_seqs": 64, "max_num_batched_tokens": sizes[-1], "max_model_len": 1024, "num_pages": 1100, **changes}
    config = loading.fit_config(loading.first_config("cuda", sizes, **given), source, "bfloat16", "cuda")
    worker = loading.make_gpu_executor(source, config, speculative, lambda _: None)
    return DeviceWorld(worker, config, Tokenizer.load(source.path), source.path)


def requests_for(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(str(i), np.array(p, np.int32), params, seed=1000 + i) for i, p in enumerate(prompts)]


def state(worker: CudaWorker, program: Program, live: int) -> dict[str, np.ndarray]:
    """What a program has left, live rows alone: logits, taps, published tokens (a probe asks for no log-probabilities)."""
    found = {name: worker.host(array)[:live] for name, array in program.arrays.items()}
    return found | {name: program.results.read(name, live) for name in ("target", "finite", "ids") if name in program.results.columns}
