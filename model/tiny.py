"""Random models of any size in exactly the on-disk format of the demo: target, drafter, tokenizer, template, configs.

For tests and benchmarks that need a shape rather than a language. Each tensor is drawn from (seed, its name), so a changed
depth or width leaves the other tensors as they were.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from model import dflash, kimi_k26
from model.kimi_k26 import Spec
from model.pack_w4 import triple_from_codes
from model.tiny_vocab import DEMO, write_tokenizer
from runtime.types import F32
from runtime.w4 import GROUP

Tensors = dict[str, NDArray[Any]]

TARGET_DEFAULTS = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,  # Kimi's; the demo's is 64
    "intermediate_size": 256,
    "moe_intermediate_size": 128,  # cuts for TP 1, 2 and 4: whole groups of 32
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
DRAFTER_DEFAULTS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # 4 · 64 is not the hidden size, as in Kimi's drafter
    "intermediate_size": 256,
}
SHARED = ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")


def make_tiny(
    path: str | Path, seed: int = 0, *, drafter: bool = True, flat_config: bool = False, rope_parameters: bool = False, **overrides: Any
) -> Path:
    """Writes a seeded random model folder and returns it.

    Overrides are keys of config.json's text model (num_hidden_layers=4, n_routed_experts=16, vocab_size=48 …); `rope_scaling`
    is merged into the default, None switches YaRN off. A `draft_` before a key sets the drafter's (draft_block_size=4).
    flat_config: K2's form, without text_config and without `language_model.`; rope_parameters: transformers 5's spelling.
    Logits have unit-ish spread. Raises ValueError for an unknown key or a size that INT4 groups can not hold, FileExistsError
    if the folder already holds a model.
    """
    folder = Path(path)
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} already holds a model; choose an empty folder")
    config, draft_config = _configs(overrides)
    text = config["text_config"]
    folder.mkdir(parents=True, exist_ok=True)
    special = write_tokenizer(folder, text["vocab_size"], text["max_position_embeddings"])
    ids = {"bos_token_id": special["[BOS]"], "eos_token_id": special["<|im_end|>"], "pad_token_id": special["[PAD]"]}
    for block in (config, text):
        block.update(ids)
    config["media_placeholder_token_id"] = special.get("<|media_pad|>", special["[UNK]"])
    generation = json.loads((DEMO / "generation_config.json").read_text("utf-8"))
    _write_json(folder / "generation_config.json", generation | ids | {"max_length": text["max_position_embeddings"]})
    _write_target(folder, text, seed, prefix="" if flat_config else "language_model.")
    if drafter:
        _fit_drafter(draft_config, text, mask=special["[UNK]"])
        (folder / "drafter").mkdir()
        spec = dflash.tensors(dflash.Config.from_json(draft_config))
        save_file(_draw_all(spec, seed, "drafter."), folder / "drafter" / "model.safetensors", {"format": "pt"})
        _write_json(folder / "drafter" / "config.json", _spell_rope(draft_config) if rope_parameters else draft_config)
    if rope_parameters:
        config["text_config"] = text = _spell_rope(text)
    _write_json(folder / "config.json", text if flat_config else config)
    return folder


def quantise(w: F32) -> tuple[NDArray[np.uint8], NDArray[ml_dtypes.bfloat16]]:
    """Rounds w [n, k] to INT4 as K2's training does: scale = absmax / 7 over 32 inputs (bf16, at least 1e-5), round to nearest.

    Returns codes u8 [n, k] in 1..15 (code - 8 is the weight in scales) and scale bf16 [n, k/32].
    """
    groups = w.reshape(len(w), -1, GROUP)
    scale = np.maximum(np.abs(groups).max(-1) / 7, 1e-5).astype(ml_dtypes.bfloat16)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -7, 7) + 8
    return codes.astype(np.uint8).reshape(w.shape), scale


def _configs(overrides: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and the drafter's, the demo's with the sizes changed."""
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text("utf-8"))
    draft: dict[str, Any] = json.loads((DEMO / "drafter" / "config.json").read_text("utf-8"))
    text = config["text_config"]
    text.update(TARGET_DEFAULTS)
    draft.update(DRAFTER_DEFAULTS)
    draft["dflash_config"]["target_layer_ids"] = None
    for key, value in overrides.items():
        of_draft = key.startswith("draft_")
        name, block = (key.removeprefix("draft_"), draft) if of_draft else (key, text)
        if of_draft and name == "target_layer_ids":
            draft["dflash_config"][name] = list(value)
        elif name not in block:
            raise ValueError(f"{key} is no key of the {'drafter' if of_draft else 'target'}'s config; known are {', '.join(sorted(block))}")
        else:
            block[name] = {**block[name], **value} if isinstance(value, dict) and isinstance(block[name], dict) else value
    text["num_key_value_heads"] = overrides.get("num_key_value_heads", text["num_attention_heads"])
    for key in ("hidden_size", "moe_intermediate_size"):
        if text[key] % GROUP:
            raise ValueError(f"{key} {text[key]} is no multiple of {GROUP}, the inputs that share an INT4 scale")
    if not 1 <= text["num_experts_per_tok"] <= text["n_routed_experts"]:
        raise ValueError(f"num_experts_per_tok {text['num_experts_per_tok']} is not in 1..n_routed_experts {text['n_routed_experts']}")
    return config, draft


def _fit_drafter(draft: dict[str, Any], text: dict[str, Any], mask: int) -> None:
    """Gives the drafter what it shares with its target: width, vocabulary, positions and the layers it taps."""
    draft.update({key: text[key] for key in (*SHARED, "rope_theta")})
    scaling = dict(text["rope_scaling"]) if text["rope_scaling"] else None
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
    layers = text["num_hidden_layers"]
    draft["rope_scaling"], draft["num_target_layers"] = scaling, layers
    draft["layer_types"] = ["full_attention"] * draft["num_hidden_layers"]
    draft["mask_token_id"] = draft["dflash_config"]["mask_token_id"] = mask
    if draft["dflash_config"]["target_layer_ids"] is None:
        last = layers - 1 if layers < 4 else layers - 2
        draft["dflash_config"]["target_layer_ids"] = [round(x) for x in np.linspace(0, last, min(3, layers)).tolist()]


def _write_target(folder: Path, text: dict[str, Any], seed: int, prefix: str) -> None:
    """A shard for each layer, then one for embedding, head and last norm: only one layer is in memory at a time."""
    spec = kimi_k26.tensors(kimi_k26.Config.from_json(text))
    layers = text["num_hidden_layers"]
    shard_of, total_bytes = {}, 0
    for shard in range(layers + 1):
        file = f"model-{shard + 1:05d}-of-{layers + 1:06d}.safetensors"
        layer = f"model.layers.{shard}."
        mine = {n: s for n, s in spec.items() if (n.startswith(layer) if shard < layers else not n.startswith("model.layers."))}
        tensors = {prefix + name: tensor for name, tensor in _draw_all(mine, seed).items()}
        save_file(tensors, folder / file, {"format": "pt"})
        shard_of.update(dict.fromkeys(tensors, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shard_of.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _draw_all(spec: Spec, seed: int, stream: str = "") -> Tensors:
    made: Tensors = {}
    for name, (shape, _) in spec.items():
        stem, _, part = name.rpartition(".")
        if part == "weight_packed":
            codes, scale = quantise(_draw(seed, f"{stream}{stem}.weight", (shape[0], shape[1] * 8)))
            triple = triple_from_codes(codes, scale)
            made |= {f"{stem}.weight_{kind}": array for kind, array in zip(("packed", "scale", "shape"), triple, strict=True)}
        elif part not in ("weight_scale", "weight_shape"):
            drawn = _draw(seed, stream + name, shape)
            made[name] = drawn if part == "e_score_correction_bias" else drawn.astype(ml_dtypes.bfloat16)
    return made


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> F32:
    """Normal values by the tensor's role: linear maps keep unit variance, norms are near 1, embeddings 1, the router bias 0.1.

    Sigmoid scores of unit logits spread by 0.2, so a bias of 0.1 changes what about half of the tokens select.
    """
    drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * drawn
    if name.endswith("e_score_correction_bias"):
        return np.float32(0.1) * drawn
    return drawn if "embed_tokens" in name else drawn * np.float32(shape[-1] ** -0.5)


def _spell_rope(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps base and scaling together under rope_parameters."""
    rest = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    scaling = dict(config["rope_scaling"] or {"rope_type": "default"})
    scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
    return rest | {"rope_parameters": scaling | {"rope_theta": config["rope_theta"]}}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
