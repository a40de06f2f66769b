"""Kimi K2, K2-Thinking, K2.5 and K2.6 text models: config, tensors, loading and the forward pass.

DeepSeek-V3's architecture (arXiv 2412.19437): multi-head latent attention in its absorbed form over
a paged cache of 576 numbers a token and layer (1,152 B instead of 64 heads' 81,920), sigmoid routing
with a selection bias, INT4 experts, one shared expert, dense first layers. The forward is written in
the op vocabulary alone, so one text runs in NumPy, is counted by the null backend and is captured in
a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.pack_w4 import w4_source
from model.rope import Rope
from model.stages import Passing, Report, Stage
from runtime.chunks import ChunkShape
from runtime.source import Source, cut_stacked, one_late, stack
from runtime.types import Array, StepPlan

# transformers builds q_a_layernorm and kv_a_layernorm with their default epsilon, whatever rms_norm_eps
# says, and so were these models trained; 1e-5 there moves the demo's logits by up to 3e-4.
LATENT_EPS = 1e-6

Spec = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes and constants, all read from config.json (they differ within the family)."""

    layers: int
    dense_layers: int
    hidden: int
    heads: int
    q_rank: int
    latent: int
    nope: int
    rope_dim: int
    value: int
    dense_width: int
    experts: int
    top_k: int
    expert_width: int
    shared_experts: int
    routed_scale: float
    eps: float
    vocab: int
    max_positions: int
    rope: Rope
    cut_latent: bool = False  # q_a and kv_a cut over ranks, their products gathered; no key of config.json: what is faster decides

    @property
    def cache_width(self) -> int:
        return self.latent + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        return self.rope.softmax_scale(self.nope + self.rope_dim)

    @staticmethod
    def from_json(config: Mapping[str, Any], where: str = "config.json") -> Config:
        """Reads a nested (text_config) or bare config.

        Raises ValueError naming file, key and value for what is missing or unsupported.
        """
        text = config.get("text_config", config)
        if text.get("model_type") not in ("kimi_k2", "deepseek_v3"):
            raise ValueError(f"{where}: model_type {text.get('model_type')!r} is not supported; kimi_k2 and deepseek_v3 are")
        required = {
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        }  # fmt: skip
        for key, value in required.items():
            if text.get(key, value) != value:
                raise ValueError(f"{where}: {key} is {text[key]!r}; this model file implements {value!r} only")
        try:
            return Config(
                layers=int(text["num_hidden_layers"]), dense_layers=int(text["first_k_dense_replace"]),
                hidden=int(text["hidden_size"]), heads=int(text["num_attention_heads"]), q_rank=int(text["q_lora_rank"]),
                latent=int(text["kv_lora_rank"]), nope=int(text["qk_nope_head_dim"]), rope_dim=int(text["qk_rope_head_dim"]),
                value=int(text["v_head_dim"]), dense_width=int(text["intermediate_size"]),
                experts=int(text["n_routed_experts"]), top_k=int(text["num_experts_per_tok"]),
                expert_width=int(text["moe_intermediate_size"]), shared_experts=int(text["n_shared_experts"]),
                routed_scale=float(text["routed_scaling_factor"]), eps=float(text["rms_norm_eps"]),
                vocab=int(text["vocab_size"]), max_positions=int(text["max_position_embeddings"]), rope=Rope.from_json(text, where),
            )  # fmt: skip
        except (KeyError, TypeError) as missing:
            raise ValueError(f"{where}: key {missing} is missing or null") from None

    def check_tp(self, tp: int) -> None:
        """Raises ValueError with the legal sizes if the model can not be cut over `tp` ranks."""
        legal = [n for n in range(1, self.heads + 1) if self._divides(n)]
        if tp not in legal:
            raise ValueError(
                f"tensor_parallel_size {tp} does not divide this model; legal: {', '.join(map(str, legal))} "
                f"(heads {self.heads}, dense width {self.dense_width}, expert width {self.expert_width} in groups of 32, "
                f"vocabulary {self.vocab}{f', q_a and kv_a {self.q_rank + self.cache_width}' if self.cut_latent else ''})"
            )

    def _divides(self, tp: int) -> bool:
        parts = (self.heads, self.dense_width, self.expert_width, self.vocab)
        latent = not self.cut_latent or (self.q_rank + self.cache_width) % tp == 0
        return latent and all(p % tp == 0 for p in parts) and (self.expert_width // tp) % 32 == 0


def tensors(c: Config) -> Spec:
    """Every tensor of a checkpoint: name without `language_model.`, shape and dtype."""
    spec: Spec = {
        "model.embed_tokens.weight": ((c.vocab, c.hidden), "bf16"),
        "lm_head.weight": ((c.vocab, c.hidden), "bf16"),
        "model.norm.weight": ((c.hidden,), "bf16"),
    }
    for i in range(c.layers):
        p = f"model.layers.{i}."
        for name, shape in (
            ("input_layernorm", (c.hidden,)),
            ("post_attention_layernorm", (c.hidden,)),
            ("self_attn.q_a_proj", (c.q_rank, c.hidden)),
            ("self_attn.q_a_layernorm", (c.q_rank,)),
            ("self_attn.q_b_proj", (c.heads * (c.nope + c.rope_dim), c.q_rank)),
            ("self_attn.kv_a_proj_with_mqa", (c.cache_width, c.hidden)),
            ("self_attn.kv_a_layernorm", (c.latent,)),
            ("self_attn.kv_b_proj", (c.heads * (c.nope + c.value), c.latent)),
            ("self_attn.o_proj", (c.hidden, c.heads * c.value)),
        ):
            spec[f"{p}{name}.weight"] = (shape, "bf16")
        if i < c.dense_layers:
            _mlp_spec(spec, f"{p}mlp.", c.dense_width, c.hidden)
            continue
        spec[f"{p}mlp.gate.weight"] = ((c.experts, c.hidden), "bf16")
        spec[f"{p}mlp.gate.e_score_correction_bias"] = ((c.experts,), "f32")
        _mlp_spec(spec, f"{p}mlp.shared_experts.", c.expert_width * c.shared_experts, c.hidden)
        for e in range(c.experts):
            up, down = (c.expert_width, c.hidden), (c.hidden, c.expert_width)
            for name, (n, k) in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
                q = f"{p}mlp.experts.{e}.{name}."
                spec[f"{q}weight_packed"] = ((n, k // 8), "i32")
                spec[f"{q}weight_scale"] = ((n, k // 32), "bf16")
                spec[f"{q}weight_shape"] = ((2,), "i32")
    return spec


def _mlp_spec(spec: Spec, prefix: str, width: int, hidden: int) -> None:
    spec[f"{prefix}gate_proj.weight"] = ((width, hidden), "bf16")
    spec[f"{prefix}up_proj.weight"] = ((width, hidden), "bf16")
    spec[f"{prefix}down_proj.weight"] = ((hidden, width), "bf16")


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Array  # [2*F, H]
    down: Array  # [H, F]


@dataclass(frozen=True, slots=True)
class Moe:
    router: Array  # [E, H]
    bias: Array  # [E] f32
    shared: Mlp
    w13: Any  # [E, 2*F, H] w4
    w2: Any  # [E, H, F] w4


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Array  # [H]
    qkv_a: Array  # [Q+L+R, H]: q_a over kv_a, one product; a rank's part of the rows if cut_latent
    q_norm: Array  # [Q]
    kv_norm: Array  # [L]
    q_b: Array  # [A*(N+R), Q]
    w_uk: Array  # [A, L, N]
    w_uv: Array  # [A, U, L]
    o: Array  # [H, A*U]
    post_norm: Array  # [H]
    mlp: Mlp | Moe


@dataclass(frozen=True, slots=True)
class Weights:
    """One rank's share. A and F are this rank's heads and expert width; the embedding and head hold V / tp rows from `first` on."""

    embed: Any  # [V / tp, H]; None in a stage that needs it not, and so the head
    head: Any
    norm: Array
    first: int
    layers: tuple[Layer, ...]
    cos_sin: Array  # [X, R] f32
    start: int = 0  # number of its first layer


def load(
    ckpt: Any, c: Config, backend: Any, rank: int, tp: int, positions: int, progress: Report = lambda _: None, stage: Stage | None = None
) -> Weights:
    """Hands this rank's slices of a `model.weights.Checkpoint` or `model.dummy.DummyCheckpoint` to the backend.

    Cuts: heads, widths and vocabulary; the latent path is replicated, but for q_a and kv_a if c.cut_latent. A backend may still be
    fetching when this returns. stage: which layers; None: all.
    """
    stage = stage or Stage(0, c.layers)
    c.check_tp(tp)
    ckpt.expect(tensors(c))

    def get(name: str, rows: slice | None = None, cols: slice | None = None) -> Source:
        return ckpt.source(f"{name}.weight", rows, cols)  # type: ignore[no-any-return]

    def part(size: int) -> slice:
        return slice(rank * size // tp, (rank + 1) * size // tp)

    def mlp(prefix: str, width: int) -> Mlp:
        cut = part(width)
        both = stack(get(f"{prefix}gate_proj", cut), get(f"{prefix}up_proj", cut))
        return Mlp(backend.param(both), backend.param(get(f"{prefix}down_proj", None, cut)))

    def moe(prefix: str) -> Moe:
        cut = part(c.expert_width)
        names = [f"{prefix}experts.{e}." for e in range(c.experts)]
        return Moe(  # in this order: a backend fetches gate and up while down is named
            backend.param(get(f"{prefix}gate")),
            backend.param(ckpt.source(f"{prefix}gate.e_score_correction_bias")),
            mlp(f"{prefix}shared_experts.", c.expert_width * c.shared_experts),
            backend.param_w4(w4_source([tuple(ckpt.triple(f"{n}{kind}", cut, None) for kind in ("gate_proj", "up_proj")) for n in names])),
            backend.param_w4(w4_source([(ckpt.triple(f"{n}down_proj", None, cut),) for n in names])),
        )

    def latent(a: str) -> Source:  # q_a over kv_a, or this rank's rows of the two
        names, sizes = ("q_a_proj", "kv_a_proj_with_mqa"), (c.q_rank, c.cache_width)
        rows = part(sum(sizes)) if c.cut_latent else slice(0, sum(sizes))
        return stack(*(get(f"{a}{names[i]}", own) for i, own in cut_stacked(rows, sizes)))

    def layer(i: int) -> Callable[[], Layer]:
        """Names what a backend fetches alone; returns what reads and turns kv_b here, and makes the layer."""
        p, heads = f"model.layers.{i}.", c.heads // tp
        a = f"{p}self_attn."
        fetched = {
            "input_norm": backend.param(get(f"{p}input_layernorm")),
            "qkv_a": backend.param(latent(a)),
            "q_norm": backend.param(get(f"{a}q_a_layernorm")),
            "kv_norm": backend.param(get(f"{a}kv_a_layernorm")),
            "q_b": backend.param(get(f"{a}q_b_proj", part(c.heads * (c.nope + c.rope_dim)))),
            "o": backend.param(get(f"{a}o_proj", None, part(c.heads * c.value))),
            "post_norm": backend.param(get(f"{p}post_attention_layernorm")),
            "mlp": mlp(f"{p}mlp.", c.dense_width) if i < c.dense_layers else moe(f"{p}mlp."),
        }

        def finish() -> Layer:
            kv_b = get(f"{a}kv_b_proj", part(c.heads * (c.nope + c.value))).read().reshape(heads, c.nope + c.value, c.latent)
            progress(f"layer {i}")
            return Layer(w_uk=backend.param(kv_b[:, : c.nope].transpose(0, 2, 1)), w_uv=backend.param(kv_b[:, c.nope :]), **fetched)

        return finish

    vocab = part(c.vocab)
    return Weights(
        embed=backend.param(get("model.embed_tokens", vocab)) if stage.embeds else None,
        head=backend.param(get("lm_head", vocab)) if stage.heads else None,
        norm=backend.param(get("model.norm")),
        first=vocab.start,
        layers=tuple(one_late(layer(i) for i in stage.layers)),  # 25 ms of the host's work, while the next layer comes
        cos_sin=backend.param(c.rope.table(positions, c.rope_dim)),
        start=stage.start,
    )


def forward(
    ops: Any, comm: Any, c: Config, w: Weights, plan: StepPlan, cache: Array, page_size: int, taps: Sequence[int] = (), near: Any = None
) -> tuple[Array, Array] | None:
    """One step: logits [r, V / tp] f32 of the plan's out_rows, and the residual stream after each layer of `taps`, [m, len(taps), H] bf16.

    cache [layers, S, L+R] is read and written; the plan's moves come first. near: the stages before and after these layers
    (`runtime.comm.Neighbours`); None is returned where another stage follows.
    """
    m, own = len(plan.token), range(w.start, w.start + len(w.layers))
    h, delta = (ops.buffer(name, (m, c.hidden)) for name in ("h", "delta"))
    passing = Passing(ops, (m, c.hidden), taps, own, c.layers)
    x = passing.x

    ops.kv_move(cache, plan.moves)
    if own.start:
        passing.receive(near)
    else:
        ops.embed(plan.token, w.embed, w.first, out=x)
        comm.all_reduce(x)
    ops.rms_norm(x, w.layers[0].input_norm, c.eps, out=h)
    rest = _split_chunks(ops, c, plan, w.layers[0].w_uk.shape[0], page_size)
    for i, layer in enumerate(w.layers):
        _attention(ops, comm, c, layer, w.cos_sin, h, plan, rest, cache[i], page_size, out=delta)
        comm.all_reduce_norm(ops, x, delta, layer.post_norm, c.eps, out=h)
        if isinstance(layer.mlp, Moe):
            _experts(ops, c, layer.mlp, h, out=delta)
        else:
            swiglu(ops, layer.mlp, h, out=delta)
        following = w.layers[i + 1].input_norm if i + 1 < len(own) else w.norm  # a stage before the last has no use for this h
        comm.all_reduce_norm(ops, x, delta, following, c.eps, out=h)
        passing.keep(own[i])
    if not passing.last:
        passing.send(near)
        return None
    return own_logits(ops, w, h, plan.out_rows), passing.taps


def _split_chunks(ops: Any, c: Config, plan: StepPlan, heads: int, page_size: int) -> Array | None:
    """plan.seq with -1 for the rows of long chunks, whose keys are expanded; None where the backend attends all rows absorbed."""
    m, longest = len(plan.token), plan.pages.shape[1] * page_size
    shape = ChunkShape(m, heads, c.latent, c.rope_dim, c.nope, c.value, longest, page_size)
    room = ops.chunk_room(shape)
    if not room:
        return None
    rest: Array = ops.buffer("rest", (m,), "i32")
    ops.split_chunks(plan.seq, plan.pos, plan.ctx, plan.row0, shape.least, room, rest=rest)
    return rest


def _attention(
    ops: Any, comm: Any, c: Config, layer: Layer, cos_sin: Array, h: Array, plan: StepPlan, rest: Array | None, cache: Array,
    page_size: int, *, out: Array,
) -> None:  # fmt: skip
    m, heads = h.shape[0], layer.w_uk.shape[0]
    qkv_a = ops.buffer("qkv_a", (m, c.q_rank + c.cache_width))
    q_latent = ops.buffer("q_latent", (m, c.q_rank))
    q = ops.buffer("q", (m, heads * (c.nope + c.rope_dim)))
    absorbed = ops.buffer("absorbed", (m, heads, c.cache_width))
    mixed = ops.buffer("mixed", (m, heads, c.latent))
    value = ops.buffer("value", (m, heads * c.value))

    _latents(ops, comm, layer, h, out=qkv_a)
    ops.mla_latent(qkv_a, layer.q_norm, layer.kv_norm, LATENT_EPS, plan.pos, plan.slot, cos_sin, q_latent=q_latent, cache=cache)
    ops.linear(q_latent, layer.q_b, out=q)
    ops.mla_query(q, layer.w_uk, plan.pos, cos_sin, out=absorbed)
    ops.tree_mla(
        absorbed, cache, plan.pages, page_size, plan.ctx, plan.row0, plan.seq if rest is None else rest, plan.pos, plan.slot,
        plan.ancestors, c.softmax_scale, out=mixed,
    )  # fmt: skip
    ops.mla_value(mixed, layer.w_uv, out=value)
    if rest is not None:
        given = (plan.pages, page_size, plan.ctx, plan.row0, plan.seq, rest, c.softmax_scale)
        ops.chunk_attention(q, absorbed, cache, layer.w_uk, layer.w_uv, *given, value)
    ops.linear(value, layer.o, out=out)


def _latents(ops: Any, comm: Any, layer: Layer, h: Array, *, out: Array) -> None:
    """out [m, Q+L+R] = h qkv_a^T, of which ranks make a part each where it is cut."""
    own = layer.qkv_a.shape[0]
    if own == out.shape[1]:
        ops.linear(h, layer.qkv_a, out=out)
        return
    part = ops.buffer("qkv_a_part", (h.shape[0], own))
    ops.linear(h, layer.qkv_a, out=part)
    comm.all_gather(part, out=out)


def _experts(ops: Any, c: Config, moe: Moe, h: Array, *, out: Array) -> None:
    """Routed experts on top of the shared one, so that a single all-reduce serves both."""
    shared = ops.buffer("shared", h.shape)
    expert = ops.buffer("expert", (h.shape[0], c.top_k), "i32")
    weight = ops.buffer("expert_weight", (h.shape[0], c.top_k), "f32")
    swiglu(ops, moe.shared, h, out=shared)
    ops.route(h, moe.router, moe.bias, c.routed_scale, expert=expert, weight=weight)
    ops.moe_w4(h, expert, weight, moe.w13, moe.w2, shared, out=out)


def swiglu(ops: Any, mlp: Mlp, h: Array, *, out: Array) -> None:
    """out = down(silu(gate h) * up h)."""
    width = mlp.down.shape[1]
    gate_up = ops.buffer("gate_up", (h.shape[0], 2 * width))
    hidden = ops.buffer("gated", (h.shape[0], width))
    ops.linear(h, mlp.gate_up, out=gate_up)
    ops.silu_mul(gate_up, out=hidden)
    ops.linear(hidden, mlp.down, out=out)


def own_logits(ops: Any, w: Weights, h: Array, rows: Array) -> Array:
    """Logits [len(rows), V / tp] f32 of some rows of h over this rank's share of the vocabulary."""
    chosen = ops.buffer("head_rows", (len(rows), h.shape[1]))
    local: Array = ops.buffer("local_logits", (len(rows), w.head.shape[0]), "f32")
    ops.gather_rows(h, rows, out=chosen)
    ops.linear_f32(chosen, w.head, out=local)
    return local
