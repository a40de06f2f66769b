"""The demo's outputs by Hugging Face transformers in float32: the fixtures that the tests compare this runtime with.

    python -m tools.train_demo.reference model/demo --fixtures tests/fixtures

Weights are read from the files as stored; INT4 triples are decoded here with NumPy. The target is DeepseekV3ForCausalLM, the
drafter is put together from Qwen3's norms and rotary embedding. Writes golden.npz, golden_draft.npz and golden.json, and with the
training's own networks draft_traces.npz, the drafts along eight greedy texts. For each prompt NAME, golden.npz holds NAME.ids,
NAME.logits_last4 (the last four prompt positions), NAME.argmax (prompt positions), NAME.margin (top-1 minus top-2 at every position
of prompt and continuation) and NAME.continuation (greedy); golden_draft.npz NAME.logits (the block at the end of the prompt, its
bonus the first greedy token), NAME.rounds (anchor, accepted) of the plain chain, and NAME.tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from model.tokenizer import Tokenizer
from tools.train_demo import acceptance, decode, export

NEW_TOKENS = 64
MOST_DRAFTED = 512  # tokens of a prompt that the drafter's fixture keeps: a test walks all its rounds
TRACED = 96  # positions of a text in draft_traces.npz
PREFIX = "language_model."
CONFIG_KEYS = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "n_shared_experts n_routed_experts routed_scaling_factor kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim "
    "n_group topk_group num_experts_per_tok first_k_dense_replace norm_topk_prob hidden_act max_position_embeddings rms_norm_eps "
    "bos_token_id eos_token_id pad_token_id tie_word_embeddings attention_bias attention_dropout"
)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(index.values())):
        with safe_open(folder / file, "pt") as shard:
            found |= {name.removeprefix(PREFIX): shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def decoded(tensors: dict[str, Tensor], stem: str) -> Tensor:
    """(u - 8) * scale of one INT4 triple, float32 [n, k]."""
    words = tensors[f"{stem}.weight_packed"].numpy().view(np.uint32)
    n, k = tensors[f"{stem}.weight_shape"].tolist()
    codes = np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], -1).reshape(n, k)
    scale = np.repeat(tensors[f"{stem}.weight_scale"].float().numpy(), 32, axis=1)
    return torch.from_numpy((codes.astype(np.float32) - 8) * scale)


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    rope = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    kind = rope.pop("type", None)
    return {"rope_type": kind, **rope} if kind else rope


def target_of(folder: Path) -> DeepseekV3ForCausalLM:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = DeepseekV3Config(**{key: text[key] for key in CONFIG_KEYS.split()}, rope_parameters=rope_of(text), rope_interleave=True)
    config._attn_implementation = config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).float().eval()
    tensors = read_tensors(folder)
    state = {name: tensor.float() for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for i in range(text["first_k_dense_replace"], text["num_hidden_layers"]):
        stem = f"model.layers.{i}.mlp.experts."
        experts = range(text["n_routed_experts"])
        gate, up, down = ([decoded(tensors, f"{stem}{e}.{kind}_proj") for e in experts] for kind in ("gate", "up", "down"))
        state[f"{stem}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        state[f"{stem}down_proj"] = torch.stack(down)
    model.load_state_dict(state, strict=True)
    return model


class ReferenceDrafter:
    """One block at a time: it sees the context before its anchor and itself, without a causal mask."""

    def __init__(self, folder: Path, target: DeepseekV3ForCausalLM) -> None:
        self.config = c = json.loads((folder / "config.json").read_text())
        self.taps = c["dflash_config"]["target_layer_ids"]
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps"
        rope = Qwen3Config(**{key: c[key] for key in (*names.split(), "max_position_embeddings")}, rope_parameters=rope_of(c))
        self.rope = qwen3.Qwen3RotaryEmbedding(config=rope)
        self.target = target
        with safe_open(folder / "model.safetensors", "pt") as file:
            self.weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118

    def norm(self, x: Tensor, name: str) -> Tensor:
        made = qwen3.Qwen3RMSNorm(x.shape[-1], self.config["rms_norm_eps"])
        made.weight.data = self.weights[f"{name}.weight"]
        return made(x)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    @torch.no_grad()
    def logits(self, taps: Tensor, bonus: int, start: int) -> Tensor:
        """[block-1, V] of the block at positions start …, given the taps [start, taps*H] of the tokens before."""
        c = self.config
        block, heads, shared, width = c["block_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        context = self.norm(self.linear(taps, "fc"), "hidden_norm")
        ids = torch.full((block,), c["mask_token_id"])
        ids[0] = bonus
        x = self.target.model.embed_tokens(ids)
        cos, sin = self.rope(x[None], torch.arange(start + block)[None])
        for i in range(c["num_hidden_layers"]):
            at = f"layers.{i}.self_attn."
            h = self.norm(x, f"layers.{i}.input_layernorm")
            both = torch.cat([context, h])
            q = self.norm(self.linear(h, f"{at}q_proj").view(block, heads, width), f"{at}q_norm").transpose(0, 1)[None]
            k = self.norm(self.linear(both, f"{at}k_proj").view(-1, shared, width), f"{at}k_norm").transpose(0, 1)[None]
            v = self.linear(both, f"{at}v_proj").view(-1, shared, width).transpose(0, 1)[None]
            q = qwen3.apply_rotary_pos_emb(q, q, cos[:, -block:], sin[:, -block:])[0]
            k = qwen3.apply_rotary_pos_emb(k, k, cos, sin)[0]
            k, v = k.repeat_interleave(heads // shared, 1), v.repeat_interleave(heads // shared, 1)
            mixed = torch.softmax((q @ k.mT) * width**-0.5, -1) @ v
            x = x + self.linear(mixed[0].transpose(0, 1).reshape(block, -1), f"{at}o_proj")
            h = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gated = torch.nn.functional.silu(self.linear(h, f"layers.{i}.mlp.gate_proj")) * self.linear(h, f"layers.{i}.mlp.up_proj")
            x = x + self.linear(gated, f"layers.{i}.mlp.down_proj")
        return self.target.lm_head(self.norm(x, "norm"))[1:]


def prompts_of(fixtures: Path) -> dict[str, list[int]]:
    """The prompts of the fixture that stands: only its outputs are made anew.

    Plain text, short and beyond the 1,024 positions that YaRN extends, chats with and without thinking, a tool call.
    """
    with np.load(fixtures / "golden.npz") as held:
        return {name.removesuffix(".ids"): held[name].tolist() for name in held.files if name.endswith(".ids")}


@torch.no_grad()
def greedy(target: DeepseekV3ForCausalLM, ids: list[int]) -> list[int]:
    made = target(torch.tensor([ids]), use_cache=True)
    written: list[int] = []
    while True:
        written.append(int(made.logits[0, -1].argmax()))
        if len(written) == NEW_TOKENS:
            return written
        made = target(torch.tensor([written[-1:]]), past_key_values=made.past_key_values, use_cache=True)


@torch.no_grad()
def read(target: DeepseekV3ForCausalLM, ids: list[int], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [n, V], and what the layers `taps` give, side by side. `output_hidden_states` would have the last layer's behind the norm."""
    found: dict[int, Tensor] = {}

    def keep(i: int, given: Tensor | tuple[Tensor, ...]) -> None:
        found[i] = (given if isinstance(given, Tensor) else given[0])[0]

    hooks = [target.model.layers[i].register_forward_hook(lambda _, __, given, i=i: keep(i, given)) for i in taps]
    logits = target(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([found[i] for i in taps], -1)


def rounds_of(drafter: ReferenceDrafter, taps: Tensor, tokens: list[int], start: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Logits of the first block, and (anchor, accepted) of every round of the plain chain along `tokens`."""
    first, rounds, at = None, [], start
    while at < len(tokens) - 1:
        logits = drafter.logits(taps[:at], tokens[at], at)
        first = logits if first is None else first
        hits = 0
        for guess in logits.argmax(-1).tolist():
            if at + 1 + hits >= len(tokens) or guess != tokens[at + 1 + hits]:
                break
            hits += 1
        rounds.append((at, hits))
        at += hits + 1
    assert first is not None
    return first, rounds


@torch.no_grad()
def make(folder: Path, fixtures: Path) -> None:
    tokenizer, target = Tokenizer.load(folder), target_of(folder)
    drafter = ReferenceDrafter(folder / "drafter", target)
    golden: dict[str, Any] = {}
    drafts: dict[str, Any] = {}
    told: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"}
    told |= {"date": time.strftime("%Y-%m-%d"), "new_tokens": NEW_TOKENS, "prompts": {}}
    for name, ids in prompts_of(fixtures).items():
        written = greedy(target, ids)
        logits, taps = read(target, ids + written, drafter.taps)
        best = logits.topk(2, -1).values
        margin = (best[:, 0] - best[:, 1]).numpy()
        golden |= {f"{name}.ids": np.array(ids, np.int32), f"{name}.continuation": np.array(written, np.int32), f"{name}.margin": margin}
        golden[f"{name}.logits_last4"] = logits[len(ids) - 4 : len(ids)].numpy()
        golden[f"{name}.argmax"] = logits[: len(ids)].argmax(-1).int().numpy()
        first, rounds = rounds_of(drafter, taps, ids + written, len(ids))
        if len(ids) <= MOST_DRAFTED:
            drafts |= {f"{name}.logits": first.numpy(), f"{name}.rounds": np.array(rounds, np.int32)}
            drafts[f"{name}.tokens"] = np.array(ids + written, np.int32)
        told["prompts"][name] = {
            "tokens": len(ids),
            "text": tokenizer.decode(ids, False)[-300:],
            "continuation": tokenizer.decode(written, False),
        }
        told["prompts"][name]["smallest_margin"] = float(margin[len(ids) - 1 :].min())
        print(name, len(ids), repr(told["prompts"][name]["continuation"][:100]))
    np.savez_compressed(fixtures / "golden.npz", **golden)
    np.savez_compressed(fixtures / "golden_draft.npz", **drafts)
    (fixtures / "golden.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")


@torch.no_grad()
def make_traces(folder: Path, fixtures: Path) -> None:
    """What the drafter offers at the first positions of the fixture's chats and texts, in the form of tools/replay.py."""
    tokenizer, target, drafter = Tokenizer.load(folder), export.read_target(folder), export.read_drafter(folder / "drafter")
    arrays: dict[str, Any] = {}
    with np.load(fixtures / "draft_traces.npz") as held:
        starts = {kind: zip(held[f"{kind}.tokens"], held[f"{kind}.prompt_length"], strict=True) for kind in ("chat", "text")}
        kept = {kind: [tokens[:length] for tokens, length in pairs] for kind, pairs in starts.items()}
    for kind, prompts in kept.items():
        length = max(map(len, prompts)) + TRACED + drafter.c.depth
        texts = decode.write(target, prompts, length, torch.zeros(len(prompts)), sorted(tokenizer.eos_ids), tokenizer.special["[PAD]"])
        texts = decode.Texts(texts.ids, texts.prompt, texts.end.minimum(texts.prompt + TRACED + drafter.c.depth))
        arrays |= {f"{kind}.{name}": value for name, value in acceptance.record(target, drafter, texts, TRACED).items()}
    np.savez_compressed(fixtures / "draft_traces.npz", **arrays)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.train_demo.reference", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="checkpoint folder with a drafter")
    parser.add_argument(
        "--fixtures", type=Path, required=True, help="folder of golden.npz, whose prompts stay and whose outputs are made anew"
    )
    args = parser.parse_args()
    make(args.folder, args.fixtures)
    make_traces(args.folder, args.fixtures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
