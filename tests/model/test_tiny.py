"""make_tiny writes the demo's format at any size, and its random models are alive: text, context and routing all matter."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.rope import Rope
from model.tiny import make_tiny, quantise
from model.tiny_vocab import special_tokens
from model.tokenizer import Tokenizer
from model.weights import Checkpoint

DEMO = Path(__file__).parents[2] / "model" / "demo"
F32 = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tiny", seed=1)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def key_paths(value: Any, at: str = "") -> Iterator[str]:
    """Every path of keys in nested JSON objects, with the type of what stands there; token ids are all called N."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from key_paths(inner, f"{at}.{'N' if key.isdigit() else key}")
    else:
        yield f"{at}: {type(value).__name__}"


# ---- the format ------------------------------------------------------------------------------------------------------------


def test_files_and_keys_are_the_demos(tiny: Path) -> None:
    ignored = {"CARD.md", "LICENCES", "training.json"}
    assert {re.sub(r"\d{5,}", "N", p.name) for p in tiny.iterdir()} == {re.sub(r"\d{5,}", "N", p.name) for p in DEMO.iterdir()} - ignored
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "drafter/config.json"):
        assert set(key_paths(read(tiny / name))) == set(key_paths(read(DEMO / name))), name
    assert (tiny / "chat_template.jinja").read_bytes() == (DEMO / "chat_template.jinja").read_bytes()


def kinds(folder: Path) -> set[tuple[str, str, int]]:
    ckpt = Checkpoint.open(folder)
    return {(re.sub(r"\.\d+\.", ".N.", name), ckpt.dtype(name), len(ckpt.shape(name))) for name in ckpt.names()}


def test_tensors_are_the_demos_in_name_type_and_rank(tiny: Path) -> None:
    assert kinds(tiny) == kinds(DEMO)
    assert kinds(tiny / "drafter") == kinds(DEMO / "drafter")
    names = read(tiny / "model.safetensors.index.json")["weight_map"]
    assert all(name.startswith("language_model.") for name in names)
    assert {file for name, file in names.items() if ".layers.1." in name} == {"model-00002-of-000003.safetensors"}


def test_shapes_follow_the_overrides(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "n_routed_experts": 5, "moe_intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 400}
    sizes |= {"draft_num_hidden_layers": 1, "draft_block_size": 4, "draft_target_layer_ids": [2], "hidden_size": 96, "n_shared_experts": 2}
    folder = make_tiny(tmp_path / "t", **sizes)
    ckpt, draft = Checkpoint.open(folder), Checkpoint.open(folder / "drafter")
    assert ckpt.shape("lm_head.weight") == (400, 96)
    assert ckpt.shape("model.layers.2.mlp.experts.4.down_proj.weight_packed") == (96, 8)
    assert "model.layers.2.mlp.experts.5.down_proj.weight_packed" not in ckpt and "model.layers.3.input_layernorm.weight" not in ckpt
    assert ckpt.shape("model.layers.1.mlp.shared_experts.gate_proj.weight") == (128, 96)
    assert ckpt.shape("model.layers.0.self_attn.q_b_proj.weight") == (2 * 192, 64)
    assert draft.shape("fc.weight") == (96, 96) and "layers.1.input_layernorm.weight" not in draft
    assert draft.config["block_size"] == 4 and draft.config["dflash_config"] == {"mask_token_id": 398, "target_layer_ids": [2]}
    assert draft.config["num_target_layers"] == 3 and draft.config["layer_types"] == ["full_attention"]
    assert ckpt.text_config["num_key_value_heads"] == 2


def test_config_variants(tmp_path: Path) -> None:
    nested = Checkpoint.open(make_tiny(tmp_path / "nested"))
    flat = Checkpoint.open(make_tiny(tmp_path / "flat", flat_config=True, drafter=False))
    five = Checkpoint.open(make_tiny(tmp_path / "five", rope_parameters=True))
    plain = Checkpoint.open(make_tiny(tmp_path / "plain", rope_scaling=None))
    assert "text_config" not in flat.config and flat.config == nested.text_config and not (tmp_path / "flat" / "drafter").exists()
    assert not any(n.startswith("language_model.") for n in read(tmp_path / "flat" / "model.safetensors.index.json")["weight_map"])
    assert np.array_equal(flat.get("lm_head.weight"), nested.get("lm_head.weight"))
    assert "rope_scaling" not in five.text_config and "rope_theta" not in five.text_config
    rope = Rope.from_json(nested.text_config, "")
    assert Rope.from_json(five.text_config, "") == rope and rope.factor == 4.0
    assert Rope.from_json(read(tmp_path / "five" / "drafter" / "config.json"), "") == rope
    assert Rope.from_json(read(tmp_path / "nested" / "drafter" / "config.json"), "") == rope
    assert Rope.from_json(plain.text_config, "") == Rope(50000.0)
    assert Rope.from_json(Checkpoint.open(make_tiny(tmp_path / "merged", rope_scaling={"factor": 8.0})).text_config, "").factor == 8.0


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"num_layers": 3}, "num_layers is no key of the target's config; known are architectures"),
        ({"draft_blocks": 3}, "draft_blocks is no key of the drafter's config; known are"),
        ({"hidden_size": 100}, "hidden_size 100 is no multiple of 32"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size 48 is no multiple of 32"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is not in 1..n_routed_experts 8"),
        ({"vocab_size": 11}, "vocab_size 11 is too small"),
    ],
)
def test_impossible_sizes(tmp_path: Path, overrides: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make_tiny(tmp_path / "t", **overrides)


def test_an_existing_model_is_not_overwritten(tiny: Path) -> None:
    with pytest.raises(FileExistsError, match="already holds a model"):
        make_tiny(tiny)


def test_bytes_follow_the_seed(tiny: Path, tmp_path: Path) -> None:
    again, other = make_tiny(tmp_path / "again", seed=1), make_tiny(tmp_path / "other", seed=2)
    deeper = make_tiny(tmp_path / "deeper", seed=1, num_hidden_layers=3)
    files = sorted(str(p.relative_to(tiny)) for p in tiny.rglob("*") if p.is_file())
    assert all((again / f).read_bytes() == (tiny / f).read_bytes() for f in files)
    assert {f for f in files if (other / f).read_bytes() != (tiny / f).read_bytes()} == {f for f in files if f.endswith(".safetensors")}
    name = "model.layers.1.self_attn.o_proj.weight"
    assert np.array_equal(Checkpoint.open(deeper).get(name), Checkpoint.open(tiny).get(name))


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def test_quantise_rounds_to_nearest_on_absmax_over_seven() -> None:
    w = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    w[3, 32:64] = 0
    codes, scale = quantise(w)
    assert codes.dtype == np.uint8 and codes.min() == 1 and codes.max() == 15 and scale.dtype == ml_dtypes.bfloat16
    for n in range(64):
        for g in range(3):
            group, s = w[n, 32 * g : 32 * g + 32], float(scale[n, g])
            ideal = max(float(np.abs(group).max()) / 7, 1e-5)
            assert abs(s - ideal) <= ideal / 256  # bf16 keeps 8 bits
            back = (codes[n, 32 * g : 32 * g + 32].astype(np.float64) - 8) * s
            assert np.abs(back - group).max() <= s * 0.53  # half a step, and the absmax past 7 by the scale's rounding
    assert not np.abs((np.roll(codes, 1, 1).astype(np.float64) - 8) * np.repeat(scale.astype(np.float64), 32, 1) - w).max() < 1


def test_the_router_bias_is_fp32_and_selects(tiny: Path) -> None:
    ckpt = Checkpoint.open(tiny)
    bias = ckpt.get("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.dtype == np.float32 and (bias != 0).all() and (bias != bias.astype(ml_dtypes.bfloat16).astype(np.float32)).any()
    h = np.random.default_rng(0).standard_normal((200, 128), np.float32)
    scores = 1 / (1 + np.exp(-h @ ckpt.get("model.layers.1.mlp.gate.weight").astype(np.float32).T))
    chosen, unbiased = (np.sort(np.argsort(-s, axis=1)[:, :2]) for s in (scores + bias, scores))
    assert 0.1 < (chosen != unbiased).any(1).mean() < 0.9


# ---- vocabulary ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [12, 32, 51, 64, 200, 267, 300, 320, 512, 4096, 5000])
def test_vocabulary_is_complete(tmp_path: Path, vocab_size: int) -> None:
    folder = make_tiny(tmp_path / "t", vocab_size=vocab_size, drafter=False)
    lines = [line.split() for line in (folder / "tiktoken.model").read_text().splitlines()]
    tokens = [base64.b64decode(text) for text, _ in lines]
    special = special_tokens(vocab_size)
    assert [int(rank) for _, rank in lines] == list(range(len(tokens))) and len(set(tokens)) == len(tokens)
    assert len(tokens) == min(special.values()) == special["[BOS]"] and special["[PAD]"] == vocab_size - 1
    singles = {t for t in tokens if len(t) == 1}
    assert len(singles) == min(256, len(tokens))
    named = {entry["content"]: int(i) for i, entry in read(folder / "tokenizer_config.json")["added_tokens_decoder"].items()}
    assert named == special
    config = read(folder / "config.json")
    assert config["eos_token_id"] == config["text_config"]["eos_token_id"] == special["<|im_end|>"]
    assert Checkpoint.open(folder).shape("model.embed_tokens.weight")[0] == vocab_size
    if vocab_size >= 267:  # all 256 bytes are there, so any text can be encoded
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.vocab_size == vocab_size and special.items() <= tokenizer.special.items()
        assert tokenizer.decode(tokenizer.encode("Größe: 3 µm\n")) == "Größe: 3 µm\n"
        assert tokenizer.eos_ids == {special["[EOS]"], special["<|im_end|>"]}


def test_full_size_ids_are_kimis() -> None:
    special = special_tokens(163840)
    expected = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "[EOT]": 163593}
    expected |= {"<|im_system|>": 163594, "<|tool_calls_section_begin|>": 163595, "<|tool_call_end|>": 163599, "<|im_middle|>": 163601}
    expected |= {"<|media_pad|>": 163605, "<think>": 163606, "</think>": 163607, "[UNK]": 163838, "[PAD]": 163839}
    assert expected.items() <= special.items()
    demo = {entry["content"]: int(i) for i, entry in read(DEMO / "tokenizer_config.json")["added_tokens_decoder"].items()}
    assert special_tokens(4096) == demo


# ---- a forward pass in a few lines: expanded keys and values, every expert, whole sequences --------------------------------


def rms(x: F32, w: F32, eps: float) -> F32:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def silu_mul(g: F32, u: F32) -> F32:
    return g / (1 + np.exp(-g)) * u


class Reference:
    """Logits [n, V] of a token sequence, float32 throughout."""

    def __init__(self, folder: Path) -> None:
        self.ckpt = Checkpoint.open(folder)
        self.c = self.ckpt.text_config
        self.rope = Rope.from_json(self.c, "")

    def w(self, name: str) -> F32:
        if f"{name}.weight_packed" in self.ckpt:
            codes, scale = self.ckpt.get_w4(name)
            return (codes.astype(np.float32) - 8) * np.repeat(scale.astype(np.float32), 32, 1)
        return self.ckpt.get(f"{name}.weight").astype(np.float32)

    def mlp(self, p: str, h: F32) -> F32:
        return silu_mul(h @ self.w(f"{p}.gate_proj").T, h @ self.w(f"{p}.up_proj").T) @ self.w(f"{p}.down_proj").T

    def turn(self, x: F32) -> F32:
        angle = np.arange(len(x))[:, None] * self.rope.inverse_frequencies(64)
        cos, sin = (f(angle).reshape(len(x), *[1] * (x.ndim - 2), 32) for f in (np.cos, np.sin))
        return np.stack([x[..., ::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., ::2] * sin], -1).reshape(x.shape)

    def attention(self, p: str, h: F32) -> F32:
        c = self.c
        n, heads, nope, rank = len(h), c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        q = rms(h @ self.w(f"{p}.q_a_proj").T, self.w(f"{p}.q_a_layernorm"), 1e-6) @ self.w(f"{p}.q_b_proj").T
        q = q.reshape(n, heads, nope + 64)
        latent = h @ self.w(f"{p}.kv_a_proj_with_mqa").T
        kv = rms(latent[:, :rank], self.w(f"{p}.kv_a_layernorm"), 1e-6) @ self.w(f"{p}.kv_b_proj").T
        kv = kv.reshape(n, heads, nope + c["v_head_dim"])
        score = np.einsum("qhd,khd->hqk", q[..., :nope], kv[..., :nope])
        score += np.einsum("qhd,kd->hqk", self.turn(q[..., nope:]), self.turn(latent[:, rank:]))
        score = score * self.rope.softmax_scale(nope + 64) + np.triu(np.full((n, n), -np.inf, np.float32), 1)
        e = np.exp(score - score.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), kv[..., nope:]).reshape(n, -1)
        return out @ self.w(f"{p}.o_proj").T

    def moe(self, p: str, h: F32) -> F32:
        s = 1 / (1 + np.exp(-h @ self.w(f"{p}.gate").T))
        order = np.argsort(-(s + self.ckpt.get(f"{p}.gate.e_score_correction_bias")), axis=1)[:, : self.c["num_experts_per_tok"]]
        keep = np.zeros_like(s)
        np.put_along_axis(keep, order, np.take_along_axis(s, order, 1), 1)
        keep *= self.c["routed_scaling_factor"] / keep.sum(1, keepdims=True)
        routed = sum(keep[:, [e]] * self.mlp(f"{p}.experts.{e}", h) for e in range(s.shape[1]))
        return np.asarray(routed + self.mlp(f"{p}.shared_experts", h), np.float32)

    def logits(self, ids: list[int]) -> F32:
        x = self.w("model.embed_tokens")[ids]
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}"
            x = x + self.attention(f"{p}.self_attn", rms(x, self.w(f"{p}.input_layernorm"), 1e-5))
            h = rms(x, self.w(f"{p}.post_attention_layernorm"), 1e-5)
            x = x + (self.mlp(f"{p}.mlp", h) if i == 0 else self.moe(f"{p}.mlp", h))
        return rms(x, self.w("model.norm"), 1e-5) @ self.w("lm_head").T


def test_the_reference_here_is_the_demos_forward() -> None:
    """The few lines above against transformers' logits, so that the next test judges real outputs."""
    golden = np.load(DEMO.parents[1] / "tests" / "fixtures" / "golden.npz")
    got = Reference(DEMO).logits(golden["plain_short.ids"].tolist())[-4:]
    assert np.abs(got - golden["plain_short.logits_last4"]).max() < 1e-3


@pytest.mark.parametrize("vocab_size", [51, 512])
def test_random_text_is_alive(tmp_path: Path, vocab_size: int) -> None:
    model = Reference(make_tiny(tmp_path / "t", seed=5, vocab_size=vocab_size, drafter=False))
    ids = np.random.default_rng(0).integers(0, vocab_size - 11, 24).tolist()
    logits = model.logits(ids)
    assert np.isfinite(logits).all() and 0.7 < logits.std() < 1.5
    assert len(set(logits.argmax(1).tolist())) > 12
    swapped = model.logits([ids[1], ids[0], *ids[2:]])
    assert np.abs(swapped[-1] - logits[-1]).max() > 0.05  # what stands far back is seen
    assert np.abs(model.logits(ids[:8]) - logits[:8]).max() < 1e-4  # and what comes later is not
    text = ids[:4]
    for _ in range(16):
        text.append(int(model.logits(text)[-1].argmax()))
    assert len(set(text[4:])) >= 8
