"""The CUDA worker of Kimi K2.6 at full width, recorded without a device: every default bucket, its plan's room, its memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from model import dflash, kimi_k26
from model.bound import BoundModel, Drafter
from runtime.comm import SoloComm
from runtime.config import EngineConfig
from runtime.cuda_worker import CudaWorker
from runtime.graph.audit import OpShare, audit_program, step_known
from runtime.graph.buckets import DEFAULT_SIZES
from runtime.graph.driver import ListDriver
from runtime.graph.probe import Probe
from runtime.hw import HARDWARE
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.tree_paths import PathPages
from runtime.loading import plan_layout
from runtime.shape_model import shape_drafter, shape_weights
from runtime.worker import Limits
from tests.blank_device import BlankDevice, placed, without_driver
from tests.worlds import ROOT

PAGE = 64
CONFIGS = {
    "kimi": (ROOT / "model/configs/kimi-k26.json", ROOT / "model/configs/kimi-k26-dflash.json", 262_144),
    "demo": (ROOT / "model/demo/config.json", ROOT / "model/demo/drafter/config.json", 4096),
}


def worker_of(name: str, invariant: bool) -> CudaWorker:
    """Two layers stand for all, one dense, one of experts; the drafter whole."""
    target, drafter, length = CONFIGS[name]
    c = replace(kimi_k26.Config.from_json(json.loads(target.read_text())), layers=2)
    d = replace(dflash.Config.from_json(json.loads(drafter.read_text())), taps=(0, 1))
    limits = Limits(c.vocab, 1024, 5000, PAGE, length, d.depth, 16)
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=length, block_size=PAGE, num_pages=5000)
    device = BlankDevice()
    ops = CudaBackend(device, invariant)
    paths = PathPages(limits.max_rows, d.depth, PAGE) if invariant else None
    cache = ops.latent_cache(c.layers, limits.num_pages * PAGE, c.cache_width, paths)
    own = Drafter(d, placed(shape_drafter(d, length), device), dflash.make_cache(ops, d, limits.num_pages * PAGE))
    model = BoundModel(c, placed(shape_weights(c, 1, length), device), cache, PAGE, length, own)
    return CudaWorker(ListDriver(device), ops, SoloComm(), model, limits, plan_layout(config, limits))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_everything_records(monkeypatch, name, invariant):
    """Smaller buckets fit the memory of the largest, which is recorded first; plans and results have room for a full step."""
    without_driver(monkeypatch)
    worker = worker_of(name, invariant)
    steps = [(p.rows, p.out_rows) for p in worker.programs() if p.kind == "step"]
    assert steps[:2] == [(1024, 1024), (1024, 64)] and {rows for rows, _ in steps} == set(DEFAULT_SIZES)
    counts = {p.name: len(p.records) for p in worker.programs()}
    assert max(counts.values()) < 100, "two layers and a drafter are some dozens of launches"
    assert counts["step 1024 out 64"] == counts["step 1024 out 1024"]
    taps = {p.arrays["taps"].address for p in worker.programs() if p.kind == "step"}
    assert len(taps) == 1, "the drafter finds every step's taps at one place"
    assert worker.backend.arena.nbytes < (5.5 if invariant else 3.0 + 4.4) * 1e9  # 4.3 GB of expanded keys of long chunks


def test_the_audit_prices_chunks_as_they_are_launched(monkeypatch):
    """Kimi K2.6's attention in two layers of a step of 1,024 rows, all of one prompt behind 8,192 keys, or of eight streams."""
    without_driver(monkeypatch)
    worker = worker_of("kimi", False)
    program = next(p for p in worker.programs() if (p.kind, p.rows, p.out_rows) == ("step", 1024, 1024))

    def shares(streams: int) -> dict[str, OpShare]:
        known = step_known(program.records, Probe(streams, 8192, 163_840, 5000, PAGE), 1024)
        return {op.op: op for op in audit_program(program, worker.driver, HARDWARE["h200"], known, 0).ops}

    prompt, eight = shares(1), shares(8)
    row_keys = 1024 * 8192 + 1024 * 1025 / 2
    assert prompt["chunk_attention"].flops == 2 * 128 * (9216 * 512 * 256 + row_keys * 320)
    assert prompt["chunk_attention"].bytes == 2 * 2 * (9216 * 576 + 64 * 512 * 256 + 1024 * 64 * (192 + 128))
    assert all(prompt[op].flops == prompt[op].bytes == 0 for op in ("mla_query", "tree_mla", "mla_value"))
    assert eight["chunk_attention"].bytes == 0, "128 rows each are too few"
    assert eight["tree_mla"].flops == 2 * 128 * 8 * (128 * 8192 + 128 * 129 / 2) * 1088
    assert eight["tree_mla"].flops > 2 * prompt["chunk_attention"].flops
