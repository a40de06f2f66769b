"""The demo's sizes, and the config.json files they make."""

from __future__ import annotations

import json
from typing import Any

from model import dflash, kimi_k26
from model.tiny_vocab import DEMO

Json = dict[str, Any]

# 31 MiB with the drafter: INT4 experts are the cheapest parameters (0.5625 B), so they get what embedding, head (6.3 MB) and
# attention (1.85 MB a layer, most of it the 512-wide latent) leave.
TARGET: Json = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "hidden_size": 384,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
}
DRAFTER: Json = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
}
TAPS = (1, 2, 3)

MINIATURE_TARGET: Json = TARGET | {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "v_head_dim": 64,
}
MINIATURE_DRAFTER: Json = DRAFTER | {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256}
MINIATURE_TAPS = (0, 1)


def target_json(sizes: Json = TARGET) -> Json:
    """config.json of a target: K2.6's keys as the demo has them, with these sizes."""
    config: Json = json.loads((DEMO / "config.json").read_text("utf-8"))
    text = config["text_config"]
    unknown = set(sizes) - set(text)
    if unknown:
        raise ValueError(f"{sorted(unknown)} are no keys of text_config")
    text.update(sizes)
    text["num_key_value_heads"] = text["num_attention_heads"]
    return config


def drafter_json(target: Json, sizes: Json = DRAFTER, taps: tuple[int, ...] = TAPS) -> Json:
    """config.json of a drafter that shares width, vocabulary, positions and YaRN with its target."""
    text = target["text_config"]
    config: Json = json.loads((DEMO / "drafter" / "config.json").read_text("utf-8"))
    config.update(sizes)
    config.update({key: text[key] for key in ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta")})
    config["rope_scaling"] = {**text["rope_scaling"], "rope_type": text["rope_scaling"]["type"]}
    del config["rope_scaling"]["type"]
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    config["num_target_layers"] = text["num_hidden_layers"]
    config["dflash_config"]["target_layer_ids"] = list(taps)
    return config


def read_target(config: Json) -> kimi_k26.Config:
    return kimi_k26.Config.from_json(config)


def read_drafter(config: Json) -> dflash.Config:
    return dflash.Config.from_json(config)
