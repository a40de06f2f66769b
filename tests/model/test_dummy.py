"""Weights that are nowhere: the same from a hash on the host and on a device, for any rank, at any depth; no file but config.json."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from model import kimi_k26
from model.dummy import DummyCheckpoint, override_config
from model.shards import CheckpointError
from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.kernels_cu.backend import CudaBackend
from runtime.load_config import LoadConfig
from runtime.null import NullBackend
from runtime.planning import memory_per_rank
from tests.runtime.kernels_cu.test_residency import Keep, compare
from tests.shim_device import Shim, ShimDevice
from tools.bench_load import ROOT

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64,
    "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip


def dummy(**overrides):
    config = json.loads((ROOT / "model/configs/kimi-k26.json").read_text(encoding="utf-8"))
    ckpt = DummyCheckpoint(override_config(config, SMALL | overrides, "kimi-k26.json"), ROOT)
    return ckpt, kimi_k26.Config.from_json(ckpt.config)


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1)])
def test_a_device_writes_the_host_s_bits(tmp_path, tp, rank):
    ckpt, config = dummy()
    backend = CudaBackend(ShimDevice(Shim(tmp_path)))
    there, here = (kimi_k26.load(ckpt, config, b, rank, tp, 64) for b in (backend, Keep()))
    assert compare(backend, there, here) == 4 + 11 + 15


def test_ranks_hold_slices_of_one_model():
    ckpt, config = dummy()
    whole, *parts = (kimi_k26.load(ckpt, config, Keep(), rank, tp, 64) for tp, rank in ((1, 0), (2, 0), (2, 1)))
    np.testing.assert_array_equal(np.concatenate([p.layers[0].q_b for p in parts]), whole.layers[0].q_b)
    np.testing.assert_array_equal(np.concatenate([p.layers[1].o for p in parts], axis=1), whole.layers[1].o)
    assert not np.array_equal(whole.layers[0].o, whole.layers[1].o)
    np.testing.assert_array_equal(np.concatenate([p.layers[1].mlp.w2.data for p in parts], axis=2), whole.layers[1].mlp.w2.data)


def test_numbers_have_the_spread_of_their_role():
    ckpt, config = dummy()
    ckpt.expect(kimi_k26.tensors(config))
    p = "model.layers.1."
    head, norm = ckpt.get("lm_head.weight").astype(np.float32), ckpt.get(f"{p}input_layernorm.weight").astype(np.float32)
    assert abs(head.mean()) < 1e-3 and abs(head.std() * 128**0.5 - 1) < 0.02
    assert abs(norm.mean() - 1) < 0.05 and 0.05 < norm.std() < 0.15
    bias = ckpt.get(f"{p}mlp.gate.e_score_correction_bias")
    assert bias.dtype == np.float32 and not bias.any()
    from model.pack_w4 import read_triple

    codes, scale = read_triple(ckpt.triple(f"{p}mlp.experts.3.up_proj"))
    weight = (codes.astype(np.float32) - 8) * np.repeat(scale.astype(np.float32), 32, axis=1)
    count = np.bincount(codes.reshape(-1), minlength=16)
    assert scale.astype(np.float32).min() > 0 and count[0] == 0 and count[1:].min() > 800
    assert abs(weight.std() * 128**0.5 - 1) < 0.1 and abs(weight.mean() * 128**0.5) < 0.02


def test_a_model_of_any_size_is_walked_without_memory():
    """Kimi K2.6 at eight layers on the null backend: the bytes that planning says, in seconds."""
    ckpt, config = dummy(**{k: v for k, v in _full().items() if k in SMALL}, num_hidden_layers=4)
    backend, start = NullBackend(), time.process_time()
    kimi_k26.load(ckpt, config, backend, 0, 8, config.max_positions)
    assert backend.weight_bytes == memory_per_rank(config, 8).weight_bytes
    assert time.process_time() - start < 10


def _full():
    text = json.loads((ROOT / "model/configs/kimi-k26.json").read_text(encoding="utf-8"))["text_config"]
    return {key: value for key, value in text.items() if key != "num_hidden_layers"}


def test_a_config_alone_is_a_model(tmp_path):
    """By folder, by file and by a built-in name, with fewer layers; and what is refused."""
    config = json.loads((ROOT / "model/configs/kimi-k26.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for model in (tmp_path, tmp_path / "config.json", "kimi-k26"):
        source = loading.open_source(model, SpeculativeConfig(), LoadConfig("dummy", {"num_hidden_layers": 3}))
        assert source.target.layers == 3 and source.checkpoint.quantised and source.file.suffix == ".json"
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        loading.open_source("kimi-k26", SpeculativeConfig())
    with pytest.raises(ValueError, match="hf_overrides: 'layers' is no key of the text model"):
        loading.open_source(tmp_path, SpeculativeConfig(), LoadConfig("dummy", {"layers": 3}))
    with pytest.raises(ValueError, match="load_format: 'dumy' is none of auto, dummy"):
        LoadConfig("dumy")
    with pytest.raises(ValueError, match="hf_overrides: not JSON"):
        LoadConfig.parse("dummy", "{")


def test_slices_outside_are_refused():
    ckpt, config = dummy()
    ckpt.expect(kimi_k26.tensors(config))
    with pytest.raises(CheckpointError, match="does not lie inside 0:512"):
        ckpt.source("lm_head.weight", slice(500, 513))
    with pytest.raises(CheckpointError, match="holds no tensor 'nothing'"):
        ckpt.get("nothing")
    with pytest.raises(CheckpointError, match="split a group of 32"):
        ckpt.triple("model.layers.1.mlp.experts.0.down_proj", None, slice(0, 48))
    with pytest.raises(CheckpointError, match="can not be cut by columns"):
        ckpt.source("model.norm.weight", None, slice(0, 8))


def test_text_from_random_weights(tmp_path):
    """The demo's config and tokenizer without its weights: another model than the demo, the same one twice."""
    import shutil

    from runtime.api import LLM
    from runtime.types import SamplingParams

    for file in ("config.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja", "generation_config.json"):
        shutil.copy(loading.DEMO / file, tmp_path / file)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    texts = []
    for _ in range(2):
        llm = LLM(tmp_path, load_format="dummy", hf_overrides={"num_hidden_layers": 2}, backend="numpy", speculative_config="none")
        texts.append([list(out.outputs[0].token_ids) for out in llm.generate(["One two three"], params)])
    assert texts[0] == texts[1] and len(texts[0][0]) == 6
