"""The loading benchmark's checkpoint: one that the loader accepts, at a size that a test can write; and its comparison."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from model import kimi_k26
from model.weights import Checkpoint
from runtime.kernels_cu import readers as ring_of_slots
from runtime.kernels_cu.backend import CudaBackend
from runtime.w4 import expert_bytes
from tests.shim_device import Shim, ShimDevice
from tools import bench_load

SMALL = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "intermediate_size": 256,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "k26"
    bench_load.write_checkpoint(path, 2, 512, **SMALL)
    return path


def test_what_is_loaded_is_compared_with_the_host(folder, tmp_path, capsys):
    with Checkpoint.open(folder) as ckpt:
        config = kimi_k26.Config.from_json(ckpt.config)
        backend = CudaBackend(ShimDevice(Shim(tmp_path)))
        backend.loading()
        run, weights = bench_load.load(ckpt, config, backend, 2, 1)
        assert list(bench_load.differences(backend, weights, ckpt, config, 2, 1)) == []
        wrong = list(bench_load.differences(backend, weights, ckpt, config, 2, 0))
        assert "model.layers.1.mlp.experts.0.w2" in wrong and "model.layers.0.o" in wrong
    assert bench_load.copy_rate(backend.device) > 0
    split = run.split()
    w13 = weights.layers[1].mlp.w13
    assert split["reads"] >= split["slots"] > 0 and sum(r.nbytes for r in run.readers) > w13.E * expert_bytes(w13.N, w13.K)
    assert 0 < sum(split[f"share_{name}"] for name in ("jobs", "slots", "reading", "sending")) < 1.1
    assert split["core_gb_s"] > 0 and split["alloc_s"] + split["upload_s"] < split["load_s"] and 0 < split["cpu_s"] <= split["load_s"] + 0.1
    assert run.seconds == pytest.approx(run.load_s + run.settle_s + run.tail_s)
    run.print()
    assert f"{len(run.readers)} readers: reading" in capsys.readouterr().out


def test_a_ring_is_measured_and_its_weights_freed(folder, tmp_path, capsys):
    device = ShimDevice(Shim(tmp_path))
    with Checkpoint.open(folder) as ckpt:
        ring, before = bench_load.ring_of("3x4x1@70"), ring_of_slots.SWITCH_S
        run = bench_load.measure_ring(argparse.Namespace(tp=2, rank=1, json=None), device, ckpt, ring, 1e9)
    out = capsys.readouterr().out
    assert "equal, bit for bit" in out and "3 readers" in out and before == ring_of_slots.SWITCH_S
    bench_load.print_table([(run, ring), (replace(run, seconds=run.nbytes / 5e8), {})], 1e9)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and any("  0.50     0.5 " in row and row.endswith("as the runtime has it") for row in table)
    assert any(row.endswith("{'threads': 3, 'slots': 4, 'slot_bytes': 1048576, 'switch_us': 70}") for row in table)
    assert sum(room.nbytes for room in device._held.values()) < 4096  # the largest scales of two sets of experts


def test_without_a_gpu_nothing_is_claimed(folder, monkeypatch):
    monkeypatch.setattr(bench_load, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench_load.main(["--folder", str(folder)])
