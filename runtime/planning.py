"""What a step and a rank of a full-size model must cost, before any weight is loaded.

The model's own forward is walked once per tensor-parallel size through the null backend; each bucket
is then priced by replacing M in the counted calls. Assumptions, all on the optimistic side, so that
the result is a floor: every operand moves once, at the machine's best rate; reading and computing
overlap within an op and ops follow one another without a gap; each row sees its context and itself;
experts are drawn uniformly and independently, E (1 - (1 - k/E)^M) distinct ones, unless `distinct`
says otherwise (real tokens of one context route alike, so real unions are smaller). A pipeline's step is its stages' one after
another; between two each rank sends its rows over an adapter of its own, NET_BPS and NET_US, which are assumed and not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from model import dflash, kimi_k26
from model.kimi_k26 import Config
from model.stages import Stage, stages_of
from runtime.chunks import TILE, ChunkShape
from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.null import Call, Collective, ShapeOnly, call_cost
from runtime.shape_model import shape_weights, walk_draft, walk_step

NET_BPS, NET_US = 50e9, 10.0  # a 400 Gb/s adapter for each GPU; an assumption

HOPPER = ("h100", "h200")  # whose kernels attend long chunks un-absorbed


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One kind of op in one step of one rank. `dims` tells equal ops apart, e.g. "N=2112 K=7168"."""

    op: str
    dims: str
    count: int
    cost: Cost  # of all `count` calls together
    floor_us: float

    @property
    def is_link(self) -> bool:
        return self.op in ("all_reduce", "all_gather", "send")


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least time of one step of `rows` rows: device work and, apart from it, the link between ranks."""

    rows: int
    table: tuple[PlanRow, ...]

    @property
    def cost(self) -> Cost:
        """What the device reads, writes and computes; bytes on the link are not in it."""
        return sum((row.cost for row in self.table if not row.is_link), Cost())

    @property
    def floor_us(self) -> float:
        return sum(row.floor_us for row in self.table if not row.is_link)

    @property
    def link_us(self) -> float:
        return sum(row.floor_us for row in self.table if row.is_link)

    def by_op(self) -> dict[str, float]:
        """Floor in microseconds for each op, in the order of first use."""
        total: dict[str, float] = {}
        for row in self.table:
            total[row.op] = total.get(row.op, 0.0) + row.floor_us
        return total


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds: weights by kind, and cache for each token of context. stage: of a pipeline, from 0."""

    tp: int
    weights: Mapping[str, int]
    kv_token_bytes: int
    chunk_bytes: int  # expanded keys of long chunks, set aside on Hopper
    stage: int = 0

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def tokens_that_fit(self, hw: Hardware, utilisation: float = 0.9, reserved: int | None = None) -> int:
        """Tokens of context that the rest of `utilisation` of the device's memory holds; 0 if the weights alone do not fit.

        reserved: bytes besides weights and cache (`runtime.reserve`); None: those of long chunks alone.
        """
        more = reserved if reserved is not None else self.chunk_bytes if hw.name in HOPPER else 0
        free = hw.memory_bytes * utilisation - self.weight_bytes - more
        return max(0, int(free // self.kv_token_bytes))


def memory_of_stages(c: Config, tp: int, stages: int, drafter: dflash.Config | None = None) -> list[RankMemory]:
    """What one rank of each stage holds. Raises ValueError for more stages than layers."""
    cut = stages_of(c.layers, stages, drafter is not None)
    return [replace(memory_per_rank(c, tp, drafter, stage), stage=number) for number, stage in enumerate(cut)]


def memory_per_rank(c: Config, tp: int, drafter: dflash.Config | None = None, stage: Stage | None = None) -> RankMemory:
    """Weight bytes of one rank by kind, and cache bytes for each token of context. stage: which layers; None: all.

    The latent cache is replicated over ranks; the drafter and its cache are cut where they divide, and lie on the last stage.
    """
    w = shape_weights(c, tp, stage=stage)
    kinds: Counter[str] = Counter()
    for layer in w.layers:
        kinds["attention"] += _nbytes(layer.qkv_a, layer.q_b, layer.w_uk, layer.w_uv, layer.o)
        kinds["norms and rotary table"] += _nbytes(layer.input_norm, layer.q_norm, layer.kv_norm, layer.post_norm)
        if isinstance(layer.mlp, kimi_k26.Mlp):
            kinds["dense layers"] += _nbytes(layer.mlp.gate_up, layer.mlp.down)
            continue
        for packed in (layer.mlp.w13, layer.mlp.w2):
            kinds["expert codes"] += packed.code_bytes
            kinds["expert scales"] += packed.scale_bytes
        kinds["shared experts"] += _nbytes(layer.mlp.shared.gate_up, layer.mlp.shared.down)
        kinds["router"] += _nbytes(layer.mlp.router, layer.mlp.bias)
    kinds["embedding"] += _nbytes(w.embed) if w.embed is not None else 0
    kinds["head"] += _nbytes(w.head) if w.head is not None else 0
    kinds["norms and rotary table"] += _nbytes(w.norm, w.cos_sin)
    token_bytes = len(w.layers) * ShapeOnly((c.cache_width,), "bf16").nbytes
    if drafter:
        kinds["drafter"] += 0
    if drafter and w.head is not None:
        drafter = drafter.part(tp)
        kinds["drafter"] = sum(ShapeOnly(shape, dtype).nbytes for shape, dtype in dflash.tensors(drafter).values())
        kinds["norms and rotary table"] += ShapeOnly((c.max_positions, drafter.head_dim), "f32").nbytes
        token_bytes += drafter.layers * 2 * ShapeOnly((drafter.kv_heads, drafter.head_dim), "bf16").nbytes
    chunks = ChunkShape(1, c.heads // tp, c.latent, c.rope_dim, c.nope, c.value, c.max_positions, TILE)
    return RankMemory(tp, dict(kinds), token_bytes, chunks.room * chunks.key_bytes)


def _nbytes(*arrays: Any) -> int:
    return sum(int(array.nbytes) for array in arrays)


def plan_step(
    c: Config,
    tp: int,
    rows: int,
    ctx: int,
    hw: Hardware,
    *,
    streams: int = 1,
    distinct: float | None = None,
    stages: int = 1,
    taps: tuple[int, ...] = (),
) -> StepFloor:
    """The floor of one step of `rows` rows over `streams` sequences of `ctx` committed tokens each, on one of `tp` ranks.

    distinct: experts hit in a layer; None for the expectation under uniform routing. stages: through which it goes in turn, with the
    hidden states after the layers `taps`, which a drafter wants.
    """
    if not 1 <= streams <= rows or ctx < 0:
        raise ValueError(f"want 1 <= streams <= rows and ctx >= 0; got streams {streams}, rows {rows}, ctx {ctx}")
    known: dict[str, float] = {"M": rows, "I": rows, "B": streams, "keys": streams * ctx + rows, "row_keys": rows * (ctx + 1)}
    if distinct is not None:
        if not c.top_k <= distinct <= c.experts:
            raise ValueError(f"distinct is {distinct}; a layer hits between {c.top_k} and {c.experts} experts")
        known["distinct"] = distinct
    ops, links = Counter[Call](), Counter[Collective]()
    for stage in stages_of(c.layers, stages, bool(taps)):
        calls = walk_step(c, tp, stage, taps) if stages > 1 else walk_step(c, tp)
        ops.update(dict(calls.ops))
        links.update(dict(calls.links))
    table = [_price_call(call, count, known, hw) for call, count in ops.items()]
    table += [_price_link(link, count, rows, tp, hw) for link, count in links.items()]
    return StepFloor(rows, tuple(table))


def plan_buckets(
    c: Config,
    tp: int,
    buckets: Iterable[int],
    ctx: int,
    hw: Hardware,
    *,
    streams: int = 1,
    distinct: float | None = None,
    stages: int = 1,
    taps: tuple[int, ...] = (),
) -> list[StepFloor]:
    """plan_step for each bucket; a bucket below `streams` is taken with a row for each of fewer streams."""
    more: dict[str, Any] = {"distinct": distinct, "stages": stages, "taps": taps}
    return [plan_step(c, tp, rows, ctx, hw, streams=min(streams, rows), **more) for rows in buckets]


def plan_draft(d: dflash.Config, c: Config, tp: int, ctx: int, hw: Hardware, *, streams: int = 1) -> StepFloor:
    """The floor of one draft round: one committed token of context and one block for each of `streams` sequences."""
    calls = walk_draft(d, c, tp, streams)
    known: dict[str, float] = {"keys": streams * ctx}
    table = [_price_call(call, count, known, hw) for call, count in calls.ops]
    table += [_price_link(link, count, link.rows, tp, hw) for link, count in calls.links]
    return StepFloor(streams * d.block, tuple(table))


_UNPRICED = ("S", "P", "W", "X", "Y", "a", "c", "n", "first", "page_size")  # symbols that tell nothing of a call's size


def _price_call(call: Call, count: int, known: Mapping[str, float], hw: Hardware) -> PlanRow:
    cost = call_cost(call, known)
    dims = " ".join(f"{name}={value}" for name, value in call.symbols if name not in known and name not in _UNPRICED)
    return PlanRow(call.op, dims, count, cost * count, cost.floor_us(hw) * count)


def _price_link(link: Collective, count: int, rows: int, tp: int, hw: Hardware) -> PlanRow:
    """A ring or a one-shot exchange: a fixed latency, then each rank receives (tp - 1) / tp of the result, twice for a sum.
    Between stages a rank's adapter carries every row."""
    if link.op == "send":
        each = float(rows * link.row_bytes)
        us = (NET_US + each / NET_BPS * 1e6) * count
        return PlanRow(link.op, f"row={link.row_bytes}B", count, Cost(0.0, each * count, 0.0), us)
    passes = 2 if link.op == "all_reduce" else 1
    received = passes * rows * link.row_bytes * (tp - 1) / tp
    each_us = hw.link_us + received / hw.link_bps * 1e6
    return PlanRow(link.op, f"row={link.row_bytes}B", count, Cost(0.0, received * count, 0.0), each_us * count)
