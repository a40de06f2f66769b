"""A model of any size without memory, and its steps counted by walking the model's own forward over it.

Every call is checked against its signature on the way, so a model that does not fit together is a
ShapeError here, at full size, in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from model import dflash, kimi_k26
from model.kimi_k26 import Config
from model.stages import Stage
from runtime.null import Call, Collective, NullBackend, NullComm, NullNeighbours, PackedShape, ShapeOnly
from runtime.types import DraftPlan, StepPlan

PAGE_SIZE = 16  # any: no cost depends on it


@dataclass(frozen=True, slots=True)
class StepCalls:
    """The distinct calls of one step on one rank, and how often each is made."""

    tp: int
    ops: tuple[tuple[Call, int], ...]
    links: tuple[tuple[Collective, int], ...]


@cache
def walk_step(c: Config, tp: int, stage: Stage | None = None, taps: tuple[int, ...] = ()) -> StepCalls:
    """Counts one step of rank 0 of `tp` with two rows of one stream: the model's forward, then the draw of its tokens.

    stage: its part of both; taps: layers whose hidden states travel with a pipeline's rows.
    """
    ops, comm = NullBackend(), NullComm(tp)
    plan, w = shape_plan(rows=2, streams=1), shape_weights(c, tp, stage=stage)
    cache_rows = cast(Any, ops.zeros((len(w.layers), 2 * PAGE_SIZE, c.cache_width)))
    made = kimi_k26.forward(ops, comm, c, w, plan, cache_rows, PAGE_SIZE, taps, NullNeighbours(comm))
    if made is not None:
        _draw(ops, comm, made[0], plan)
    return StepCalls(tp, tuple(ops.calls.items()), tuple(comm.calls.items()))


def _draw(ops: NullBackend, comm: NullComm, logits: Any, plan: StepPlan) -> None:
    rows = len(plan.out_rows)
    comm.sample(
        ops, cast(Any, logits), plan.drawing,
        target=ops.buffer("target", (rows,), "i32"), logp=ops.buffer("logp", (rows,), "f32"), finite=ops.buffer("finite", (rows,), "bool"),
        top_ids=ops.buffer("top_ids", (rows, 0), "i32"), top_logp=ops.buffer("top_logp", (rows, 0), "f32"),
    )  # fmt: skip


@cache
def walk_draft(d: dflash.Config, c: Config, tp: int, streams: int, top_k: int = 16) -> StepCalls:
    """Counts one draft round on rank 0 of `tp`, as walk_step counts a step of the target."""
    d.check_target(c, "drafter")
    d = d.part(tp)
    ops, comm, target = NullBackend(), NullComm(tp), shape_weights(c, tp)
    w = shape_drafter(d, c.max_positions)
    kv_cache = dflash.make_cache(ops, d, 2 * PAGE_SIZE)

    def i32(*shape: int) -> Any:
        return ShapeOnly(shape, "i32")

    plan = DraftPlan(
        root=i32(streams), pos=i32(streams), pages=i32(streams, 1), tap_rows=i32(streams), tap_pos=i32(streams), tap_slot=i32(streams)
    )
    taps = ops.buffer("taps", (streams, len(d.taps) * d.hidden))
    dflash.write_context(ops, d, w, cast(Any, taps), plan, kv_cache)
    rows, masks = streams * d.block, streams * d.depth
    logits = dflash.block_logits(ops, comm, d, w, target, i32(rows), i32(rows), i32(masks), plan, kv_cache, PAGE_SIZE)
    ids, logp = ops.buffer("draft_ids", (masks, top_k), "i32"), ops.buffer("draft_logp", (masks, top_k), "f32")
    comm.top_logprobs(ops, cast(Any, logits), ids=ids, logp=logp)
    return StepCalls(tp, tuple(ops.calls.items()), tuple(comm.calls.items()))


def shape_weights(c: Config, tp: int, positions: int | None = None, stage: Stage | None = None) -> kimi_k26.Weights:
    """One rank's weights as shapes without memory, cut as `kimi_k26.load` cuts them. stage: which layers; None: all."""
    stage = stage or Stage(0, c.layers)
    c.check_tp(tp)
    heads, expert_width = c.heads // tp, c.expert_width // tp

    def bf16(*shape: int) -> Any:
        return ShapeOnly(shape, "bf16")

    def mlp(width: int) -> kimi_k26.Mlp:
        return kimi_k26.Mlp(gate_up=bf16(2 * width, c.hidden), down=bf16(c.hidden, width))

    def layer(feed_forward: kimi_k26.Mlp | kimi_k26.Moe) -> kimi_k26.Layer:
        return kimi_k26.Layer(
            input_norm=bf16(c.hidden),
            qkv_a=bf16((c.q_rank + c.cache_width) // (tp if c.cut_latent else 1), c.hidden),
            q_norm=bf16(c.q_rank),
            kv_norm=bf16(c.latent),
            q_b=bf16(heads * (c.nope + c.rope_dim), c.q_rank),
            w_uk=bf16(heads, c.latent, c.nope),
            w_uv=bf16(heads, c.value, c.latent),
            o=bf16(c.hidden, heads * c.value),
            post_norm=bf16(c.hidden),
            mlp=feed_forward,
        )

    moe = kimi_k26.Moe(
        router=bf16(c.experts, c.hidden),
        bias=cast(Any, ShapeOnly((c.experts,), "f32")),
        shared=mlp(expert_width * c.shared_experts),
        w13=PackedShape(c.experts, 2 * expert_width, c.hidden),
        w2=PackedShape(c.experts, c.hidden, expert_width),
    )
    dense_layers = (layer(mlp(c.dense_width // tp)),) * c.dense_layers
    moe_layers = (layer(moe),) * (c.layers - c.dense_layers)
    return kimi_k26.Weights(
        embed=bf16(c.vocab // tp, c.hidden) if stage.embeds else None,
        head=bf16(c.vocab // tp, c.hidden) if stage.heads else None,
        norm=bf16(c.hidden),
        first=0,
        layers=(dense_layers + moe_layers)[stage.start : stage.stop],
        cos_sin=cast(Any, ShapeOnly((positions or c.max_positions, c.rope_dim), "f32")),
        start=stage.start,
    )


def shape_drafter(d: dflash.Config, positions: int) -> dflash.Weights:
    """A drafter's weights as shapes without memory: what d says a rank holds."""

    def bf16(*shape: int) -> Any:
        return ShapeOnly(shape, "bf16")

    q_width, kv_width = d.heads * d.head_dim, d.kv_heads * d.head_dim
    layer = dflash.Layer(
        input_norm=bf16(d.hidden), q=bf16(q_width, d.hidden), k=bf16(kv_width, d.hidden), v=bf16(kv_width, d.hidden),
        o=bf16(d.hidden, q_width), q_norm=bf16(d.head_dim), k_norm=bf16(d.head_dim), post_norm=bf16(d.hidden),
        mlp=kimi_k26.Mlp(gate_up=bf16(2 * d.width, d.hidden), down=bf16(d.hidden, d.width)),
    )  # fmt: skip
    return dflash.Weights(
        fc=bf16(d.hidden, len(d.taps) * d.hidden), hidden_norm=bf16(d.hidden), norm=bf16(d.hidden), layers=(layer,) * d.layers,
        cos_sin=cast(Any, ShapeOnly((positions, d.head_dim), "f32")),
    )  # fmt: skip


def shape_plan(rows: int, streams: int) -> StepPlan:
    """A StepPlan without values: every row's next token wanted, nothing moved, nothing adjusted."""

    def array(dtype: str, *shape: int) -> Any:
        return ShapeOnly(shape, dtype)

    return StepPlan(
        bucket=rows, token=array("i32", rows), pos=array("i32", rows), slot=array("i32", rows), seq=array("i32", rows),
        ancestors=array("u64", rows, 1), ctx=array("i32", streams), row0=array("i32", streams), pages=array("i32", streams, 1),
        moves=array("i32", 0, 2), out_rows=array("i32", rows), seed=array("u64", streams), temperature=array("f32", streams),
        top_p=array("f32", streams), min_p=array("f32", streams), top_k=array("i32", streams), logprobs=array("i32", streams),
        adjust_seq=array("i32", 0, 2), adjust_seq_by=array("f32", 0, 2), adjust_row=array("i32", 0, 2), adjust_row_by=array("f32", 0, 2),
        mask_rows=array("i32", 0), masks=array("u32", 0, 1),
    )  # fmt: skip
