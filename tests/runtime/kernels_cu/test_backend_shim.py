"""The whole tiny model through the CUDA backend on the CPU shim, against the definition in bfloat16: chunks, trees, drafts."""

from __future__ import annotations

import pytest

from model.tiny import make_tiny
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import Recorder
from runtime.ops import OPS
from tests.shim_device import ShimDevice
from tests.twin import Twin, cosines, story

PAGE, PAGES, STREAMS, LEAST = 16, 9, 3, 0.9995
SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "q_lora_rank": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
    "n_routed_experts": 16, "vocab_size": 64, "draft_num_hidden_layers": 1, "draft_num_attention_heads": 2,
    "draft_num_key_value_heads": 1, "draft_intermediate_size": 64, "draft_block_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=3, **SIZES)


@pytest.fixture
def twin(shim, path):
    return Twin(path, ShimDevice(shim), positions=48, pages=PAGES, page_size=PAGE, streams=STREAMS)


def test_it_has_the_vocabulary_and_nothing_else():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(CudaBackend) - {"name"} == set(OPS)
    assert not public(Recorder) & set(OPS)
    assert all(getattr(CudaBackend, name).__name__ == name for name in OPS)


def test_the_model_is_the_definitions(twin):
    for name, want, got in story(twin, SIZES["vocab_size"]):
        assert cosines(want, got).min() >= LEAST, (name, cosines(want, got))
