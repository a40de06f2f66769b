"""Writes a trained target and drafter as a K2.6 checkpoint folder, and reads one back into torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from model import dflash, kimi_k26
from model.pack_w4 import triple_from_codes
from model.tiny import quantise
from model.tiny_vocab import DEMO
from model.weights import Checkpoint
from runtime.types import Array
from runtime.w4 import GROUP
from tools.train_demo.drafting import Drafter
from tools.train_demo.network import Target

PREFIX = "language_model."
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")

_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_ATTENTION = {
    "q_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "o": "o_proj",
}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_EXPERTS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
_DRAFT_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}


def stored_names(target: Target) -> dict[str, str]:
    """Stored name of each bf16 or f32 tensor -> its name in torch's state; experts are not among them."""
    names = {"model.embed_tokens.weight": "embed", "lm_head.weight": "head", "model.norm.weight": "norm"}
    for i, layer in enumerate(target.layers):
        p, mine = f"model.layers.{i}.", f"layers.{i}."
        names |= {f"{p}{stored}.weight": mine + name for name, stored in _NORMS.items()}
        names |= {f"{p}self_attn.{stored}.weight": mine + name for name, stored in _ATTENTION.items()}
        mlp = f"{p}mlp.shared_experts." if layer.sparse else f"{p}mlp."
        names |= {f"{mlp}{stored}.weight": mine + name for name, stored in _MLP.items()}
        if layer.sparse:
            names |= {f"{p}mlp.gate.weight": mine + "router", f"{p}mlp.gate.e_score_correction_bias": mine + "bias"}
    return names


def drafter_names(drafter: Drafter) -> dict[str, str]:
    names = {"fc.weight": "fc", "hidden_norm.weight": "hidden_norm", "norm.weight": "norm"}
    for i in range(len(drafter.layers)):
        p = f"layers.{i}."
        names |= {f"{p}{stored}.weight": p + name for name, stored in _NORMS.items()}
        names |= {f"{p}self_attn.{stored}.weight": p + name for name, stored in _DRAFT_ATTENTION.items()}
        names |= {f"{p}mlp.{stored}.weight": p + name for name, stored in _MLP.items()}
    return names


def _bf16(value: Tensor) -> Array:
    return value.detach().float().cpu().numpy().astype(ml_dtypes.bfloat16)


def target_tensors(target: Target) -> dict[str, Array]:
    """Every tensor of the checkpoint by its plain name, as `kimi_k26.tensors` lists them."""
    state = target.state_dict()
    made: dict[str, Array] = {}
    for stored, name in stored_names(target).items():
        value = state[name]
        made[stored] = value.float().cpu().numpy() if stored.endswith("bias") else _bf16(value)
    for i, layer in enumerate(target.layers):
        if not layer.sparse:
            continue
        for name, stored in _EXPERTS.items():
            for e, weights in enumerate(state[f"layers.{i}.{name}"].float().cpu().numpy()):
                triple = triple_from_codes(*quantise(weights))
                at = f"model.layers.{i}.mlp.experts.{e}.{stored}.weight_"
                made |= {at + part: array for part, array in zip(("packed", "scale", "shape"), triple, strict=True)}
    return made


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_target(target: Target, config: dict[str, Any], folder: Path) -> int:
    """A shard for each layer and one for the rest; returns their bytes. Tokenizer and template are the demo's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, count = target_tensors(target), len(target.layers) + 1
    shard_of, total = {}, 0
    for shard in range(count):
        file, layer = f"model-{shard + 1:05d}-of-{count:06d}.safetensors", f"model.layers.{shard}."
        mine = {n: a for n, a in tensors.items() if (n.startswith(layer) if shard < count - 1 else not n.startswith("model.layers."))}
        save_file({PREFIX + name: np.ascontiguousarray(array) for name, array in mine.items()}, folder / file, {"format": "pt"})
        shard_of |= {PREFIX + name: file for name in mine}
        total += sum(array.nbytes for array in mine.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))})
    write_json(folder / "config.json", config)
    generation = json.loads((DEMO / "generation_config.json").read_text("utf-8"))
    write_json(folder / "generation_config.json", generation | {"max_length": config["text_config"]["max_position_embeddings"]})
    for file in TOKENIZER_FILES:
        if (DEMO / file).resolve() != (folder / file).resolve():
            shutil.copyfile(DEMO / file, folder / file)
    return total


def write_drafter(drafter: Drafter, config: dict[str, Any], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    state = drafter.state_dict()
    tensors = {stored: _bf16(state[name]) for stored, name in drafter_names(drafter).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)
    return sum(array.nbytes for array in tensors.values())


def read_target(folder: Path) -> Target:
    """The frozen target of a checkpoint folder: the very values that it stores."""
    with Checkpoint.open(folder) as checkpoint:
        config = kimi_k26.Config.from_json(checkpoint.config)
        checkpoint.expect(kimi_k26.tensors(config))
        target = Target(config)
        state = {name: torch.from_numpy(checkpoint.get(stored).astype(np.float32)) for stored, name in stored_names(target).items()}
        for i, layer in enumerate(target.layers):
            for name, stored in _EXPERTS.items() if layer.sparse else ():
                pairs = [checkpoint.get_w4(f"model.layers.{i}.mlp.experts.{e}.{stored}") for e in range(config.experts)]
                state[f"layers.{i}.{name}"] = torch.stack([_values(codes, scale) for codes, scale in pairs])
    target.load_state_dict(state)
    target.freeze()
    return target


def read_drafter(folder: Path) -> Drafter:
    with Checkpoint.open(folder) as checkpoint:
        config = dflash.Config.from_json(checkpoint.config)
        checkpoint.expect(dflash.tensors(config))
        drafter = Drafter(config)
        state = {name: torch.from_numpy(checkpoint.get(stored).astype(np.float32)) for stored, name in drafter_names(drafter).items()}
    drafter.load_state_dict(state)
    return drafter


def _values(codes: Array, scale: Array) -> Tensor:
    """(code - 8) * scale as float32 [N, K]."""
    value = (codes.astype(np.float32) - 8).reshape(len(codes), -1, GROUP) * scale.astype(np.float32)[..., None]
    return torch.from_numpy(value.reshape(codes.shape))
