"""DFlash, the block-diffusion drafter (arXiv 2602.06036): config, tensors, loading, context and block.

One forward proposes a whole block: slot 0 holds the bonus token, the others a mask token, and mask
slot i predicts the token at its own position. Every slot attends, without a causal mask, to its own
block and to the context. A context key/value depends on nothing but (target hidden states, position):
it is materialised once for each committed token and shares the target's pages, so a prefix that is
found in the cache brings its drafter along. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model import kimi_k26
from model.kimi_k26 import Mlp, Spec, swiglu
from model.rope import Rope
from runtime.source import Source, stack
from runtime.types import Array, DraftPlan


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes and constants of a drafter, read from its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    eps: float
    block: int
    mask_token: int
    taps: tuple[int, ...]
    rope: Rope
    parts: int = 1  # ranks that hold a share each: heads, kv_heads and width are one rank's then

    def part(self, tp: int) -> Config:
        """What one of `tp` ranks holds: heads and width are cut where all of them divide; else every rank has the whole drafter.

        At 8 ranks Kimi's 7.0 GB become 1.4, of which the merging of taps is 0.6, and so does what a draft reads.
        """
        if tp == 1 or any(size % tp for size in (self.heads, self.kv_heads, self.width)):
            return self
        return replace(self, heads=self.heads // tp, kv_heads=self.kv_heads // tp, width=self.width // tp, parts=tp)

    @property
    def depth(self) -> int:
        """Tokens a block proposes: its mask slots."""
        return self.block - 1

    @staticmethod
    def from_json(config: Mapping[str, Any], where: str = "drafter/config.json") -> Config:
        """Raises ValueError naming file, key and value for what is missing or unsupported (causal or windowed layers among it)."""
        inner = config.get("dflash_config", {})
        if "DFlashDraftModel" not in config.get("architectures", ()):
            raise ValueError(f"{where}: architectures is {config.get('architectures')!r}; a DFlashDraftModel is needed")
        kinds = set(config.get("layer_types") or ["full_attention"])
        if kinds != {"full_attention"} or inner.get("causal") or inner.get("use_swa") or config.get("use_sliding_window"):
            raise ValueError(
                f"{where}: only bidirectional full_attention layers are implemented; layer_types {sorted(kinds)}, dflash_config {inner}"
            )
        if inner.get("sample_from_anchor") or config.get("draft_vocab_size"):
            raise ValueError(f"{where}: sample_from_anchor and draft_vocab_size are not implemented")
        if config.get("attention_bias"):
            raise ValueError(f"{where}: attention_bias is true; only bias-free attention is implemented")
        mask = inner.get("mask_token_id", config.get("mask_token_id"))
        if mask is None:
            raise ValueError(f"{where}: neither dflash_config.mask_token_id nor mask_token_id is given")
        try:
            return Config(
                layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                heads=int(config["num_attention_heads"]),
                kv_heads=int(config["num_key_value_heads"]),
                head_dim=int(config["head_dim"]),
                width=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                eps=float(config["rms_norm_eps"]),
                block=int(config["block_size"]),
                mask_token=int(mask),
                taps=tuple(int(i) for i in inner["target_layer_ids"]),
                rope=Rope.from_json(config, where),
            )
        except (KeyError, TypeError) as missing:
            raise ValueError(f"{where}: key {missing} is missing or null") from None

    def check_target(self, target: kimi_k26.Config, where: str) -> None:
        """Raises ValueError with both values if this drafter was made for another target."""
        pairs = (("hidden_size", self.hidden, target.hidden), ("vocab_size", self.vocab, target.vocab))
        for key, mine, theirs in pairs:
            if mine != theirs:
                raise ValueError(f"{where}: {key} is {mine}, the target's is {theirs}")
        beyond = [i for i in self.taps if not 0 <= i < target.layers]
        if beyond:
            raise ValueError(f"{where}: target_layer_ids {beyond} are outside the target's {target.layers} layers")


def tensors(c: Config) -> Spec:
    """Every tensor of a drafter checkpoint: name, shape and dtype."""
    spec: Spec = {
        "fc.weight": ((c.hidden, len(c.taps) * c.hidden), "bf16"),
        "hidden_norm.weight": ((c.hidden,), "bf16"),
        "norm.weight": ((c.hidden,), "bf16"),
    }
    for i in range(c.layers):
        for name, shape in (
            ("input_layernorm", (c.hidden,)),
            ("post_attention_layernorm", (c.hidden,)),
            ("self_attn.q_proj", (c.heads * c.head_dim, c.hidden)),
            ("self_attn.k_proj", (c.kv_heads * c.head_dim, c.hidden)),
            ("self_attn.v_proj", (c.kv_heads * c.head_dim, c.hidden)),
            ("self_attn.o_proj", (c.hidden, c.heads * c.head_dim)),
            ("self_attn.q_norm", (c.head_dim,)),
            ("self_attn.k_norm", (c.head_dim,)),
            ("mlp.gate_proj", (c.width, c.hidden)),
            ("mlp.up_proj", (c.width, c.hidden)),
            ("mlp.down_proj", (c.hidden, c.width)),
        ):
            spec[f"layers.{i}.{name}.weight"] = (shape, "bf16")
    return spec


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Array  # [H]
    q: Array  # [A*J, H]
    k: Array  # [Z*J, H]
    v: Array  # [Z*J, H]
    o: Array  # [H, A*J]
    q_norm: Array  # [J]
    k_norm: Array  # [J]
    post_norm: Array  # [H]
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Weights:
    """One rank's share. A, Z and F are this rank's; fc and norms are every rank's, head and embedding the target's."""

    fc: Array  # [H, taps*H]
    hidden_norm: Array  # [H]
    norm: Array  # [H]
    layers: tuple[Layer, ...]
    cos_sin: Array  # [X, J] f32


@dataclass(frozen=True, slots=True)
class Cache:
    """Context keys and values by the target's slots."""

    k: Array  # [layers, S, Z, J]
    v: Array  # [layers, S, Z, J]


def load(ckpt: Any, c: Config, backend: Any, positions: int, attention_factor: float | None = None, rank: int = 0, tp: int = 1) -> Weights:
    """Reads a rank's share of a drafter, c.part(tp) of it, from a `model.weights.Checkpoint`.

    attention_factor overrides what cos and sin are multiplied by (`draft_rope_attention_factor`): readings of
    the published drafters disagree between 1.0 and 1.4159, and measured acceptance decides.
    """
    ckpt.expect(tensors(c))

    parts = c.part(tp).parts

    def get(name: str, rows: slice | None = None, cols: slice | None = None) -> Source:
        return ckpt.source(f"{name}.weight", rows, cols)  # type: ignore[no-any-return]

    def share(size: int) -> slice | None:
        return slice(rank * size // parts, (rank + 1) * size // parts) if parts > 1 else None

    def layer(i: int) -> Layer:
        p, width = f"layers.{i}.", share(c.width)
        queries, keys = share(c.heads * c.head_dim), share(c.kv_heads * c.head_dim)
        gate_up = stack(get(f"{p}mlp.gate_proj", width), get(f"{p}mlp.up_proj", width))
        q, k, v = (backend.param(get(f"{p}self_attn.{n}_proj", rows)) for n, rows in (("q", queries), ("k", keys), ("v", keys)))
        return Layer(
            input_norm=backend.param(get(f"{p}input_layernorm")),
            q=q,
            k=k,
            v=v,
            o=backend.param(get(f"{p}self_attn.o_proj", None, queries)),
            q_norm=backend.param(get(f"{p}self_attn.q_norm")),
            k_norm=backend.param(get(f"{p}self_attn.k_norm")),
            post_norm=backend.param(get(f"{p}post_attention_layernorm")),
            mlp=Mlp(backend.param(gate_up), backend.param(get(f"{p}mlp.down_proj", None, width))),
        )

    return Weights(
        backend.param(get("fc")),
        backend.param(get("hidden_norm")),
        backend.param(get("norm")),
        tuple(layer(i) for i in range(c.layers)),
        backend.param(c.rope.table(positions, c.head_dim, attention_factor)),
    )


def make_cache(backend: Any, c: Config, slots: int) -> Cache:
    shape = (c.layers, slots, c.kv_heads, c.head_dim)
    return Cache(backend.zeros(shape), backend.zeros(shape))


def write_context(ops: Any, c: Config, w: Weights, taps: Array, plan: DraftPlan, cache: Cache) -> None:
    """Materialises the context of the plan's tap_rows (rows of taps [m, taps*H]) at their positions and slots."""
    n = len(plan.tap_rows)
    chosen = ops.buffer("draft_taps", (n, taps.shape[1]))
    merged = ops.buffer("draft_merged", (n, c.hidden))
    ctx = ops.buffer("draft_ctx", (n, c.hidden))
    ops.gather_rows(taps, plan.tap_rows, out=chosen)
    ops.linear(chosen, w.fc, out=merged)
    ops.rms_norm(merged, w.hidden_norm, c.eps, out=ctx)
    for i, layer in enumerate(w.layers):
        k, v = _keys_values(ops, c, layer, w.cos_sin, ctx, plan.tap_pos)
        ops.kv_write(k, v, plan.tap_slot, k_cache=cache.k[i], v_cache=cache.v[i])


def _keys_values(ops: Any, c: Config, layer: Layer, cos_sin: Array, x: Array, pos: Array) -> tuple[Array, Array]:
    """k [n, Z, J], normed and rotated, and v [n, Z*J], of context rows and of block rows alike."""
    n, width = x.shape[0], c.kv_heads * c.head_dim
    raw = ops.buffer("draft_k_raw", (n, width))
    k = ops.buffer("draft_k", (n, c.kv_heads, c.head_dim))
    v = ops.buffer("draft_v", (n, width))
    ops.linear(x, layer.k, out=raw)
    ops.head_norm_rope(raw, layer.k_norm, c.eps, pos, cos_sin, out=k)
    ops.linear(x, layer.v, out=v)
    return k, v


def block_logits(
    ops: Any,
    comm: Any,
    c: Config,
    w: Weights,
    target: kimi_k26.Weights,
    token: Array,
    pos: Array,
    mask_rows: Array,
    plan: DraftPlan,
    cache: Cache,
    page_size: int,
) -> Array:
    """Logits [B*(block-1), V / tp] f32 of the mask slots: this rank's share of the vocabulary.

    c: what the rank holds. token, pos [B*block]: each root, then masks; mask_rows: their row numbers.
    """
    m = len(token)

    def add_norm(weight: Array) -> None:
        if c.parts > 1:
            comm.all_reduce_norm(ops, x, delta, weight, c.eps, out=h)
        else:
            ops.add_rms_norm(x, delta, weight, c.eps, out=h)

    x, h, delta = (ops.buffer(f"draft_{name}", (m, c.hidden)) for name in ("x", "h", "delta"))
    raw = ops.buffer("draft_q_raw", (m, c.heads * c.head_dim))
    q = ops.buffer("draft_q", (m, c.heads, c.head_dim))
    mixed = ops.buffer("draft_mixed", (m, c.heads * c.head_dim))
    ops.embed(token, target.embed, target.first, out=x)
    comm.all_reduce(x)
    ops.rms_norm(x, w.layers[0].input_norm, c.eps, out=h)
    for i, layer in enumerate(w.layers):
        ops.linear(h, layer.q, out=raw)
        ops.head_norm_rope(raw, layer.q_norm, c.eps, pos, w.cos_sin, out=q)
        k, v = _keys_values(ops, c, layer, w.cos_sin, h, pos)
        ops.block_attention(q, k, v, cache.k[i], cache.v[i], plan.pages, page_size, plan.pos, c.head_dim**-0.5, out=mixed)
        ops.linear(mixed, layer.o, out=delta)
        add_norm(layer.post_norm)
        swiglu(ops, layer.mlp, h, out=delta)
        add_norm(w.layers[i + 1].input_norm if i + 1 < c.layers else w.norm)
    return kimi_k26.own_logits(ops, target, h, mask_rows)


def block_rows(c: Config, plan: DraftPlan, last_position: int) -> tuple[Array, Array, Array]:
    """token [B*block], pos [B*block], mask_rows [B*(block-1)] of a plan's roots; positions stop at last_position."""
    streams = len(plan.root)
    token = np.full((streams, c.block), c.mask_token, np.int32)
    token[:, 0] = plan.root
    pos = np.minimum(plan.pos[:, None] + np.arange(c.block, dtype=np.int32), last_position).astype(np.int32)
    rows = np.arange(streams * c.block, dtype=np.int32).reshape(streams, c.block)
    return token.reshape(-1), pos.reshape(-1), np.ascontiguousarray(rows[:, 1:]).reshape(-1)
