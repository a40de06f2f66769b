"""The drafter's ops and sampling, as launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.kernels_cu import block_attention as attention
from runtime.kernels_cu import draft, sample_ranks
from runtime.kernels_cu import sample as sampling
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.recorder import Recorder, op
from runtime.ops import OPS
from runtime.shapes import bind, parse

_EXPECTED_KEYS = 4096  # the context that the splits of a block's attention are chosen for, where pages reach that far


@op
def head_norm_rope(
    r: Recorder, x: DeviceArray, w: DeviceArray, eps: float, pos: DeviceArray, cos_sin: DeviceArray, *, out: DeviceArray
) -> None:
    m, heads, width = out.shape
    config = draft.Config(width)
    call = draft.head_norm_rope(
        config, m, heads, eps, x=x.flat, w=w.flat, cos_sin=cos_sin.flat, pos=pos.flat, out=out.flat, alive=r.alive(m)
    )  # fmt: skip
    r.launch(call, r.device.functions(draft.SOURCE, config.defines(), draft.ENTRIES))


@op
def kv_write(r: Recorder, k: DeviceArray, v: DeviceArray, slot: DeviceArray, *, k_cache: DeviceArray, v_cache: DeviceArray) -> None:
    m, heads, width = k.shape
    call = draft.kv_write(m, heads * width, k=k.flat, v=v.flat, slot=slot.flat, k_cache=k_cache.flat, v_cache=v_cache.flat)
    r.launch(call, r.device.functions(draft.SOURCE, draft.Config(width).defines(), draft.ENTRIES))


@op
def block_attention(
    r: Recorder,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    k_cache: DeviceArray,
    v_cache: DeviceArray,
    pages: DeviceArray,
    page_size: int,
    ctx: DeviceArray,
    scale: float,
    *,
    out: DeviceArray,
) -> None:
    """Dead streams are those of ctx -1."""
    (m, heads, width), streams = q.shape, len(ctx)
    if m % streams:
        raise ValueError(f"block_attention: {m} rows are no whole blocks of {streams} streams")
    dims = attention.Dims(streams, m // streams, heads, k.shape[1], width, pages.shape[1], page_size)
    config = r.choose(("block_attention", dims), lambda: _config(r, dims))
    at = r.scratch("block_attention", attention.workspace_bytes(dims, config))
    at |= {"q": q.flat, "k": k.flat, "v": v.flat, "k_cache": k_cache.flat, "v_cache": v_cache.flat}
    at |= {"pages": pages.flat, "ctx": ctx.flat, "out": out.flat}
    functions = r.device.functions(attention.SOURCE, config.defines(dims), attention.ENTRIES)
    for call in attention.calls(config, dims, scale, at):
        r.launch(call, functions)


def _config(r: Recorder, dims: attention.Dims) -> attention.Config:
    dims.check()
    if r.invariant:
        return attention.Config()
    keys = min(dims.P * dims.page_size, _EXPECTED_KEYS)
    sms = r.device.sms
    return min(attention.candidates(dims, sms), key=lambda config: attention.predict_us(dims, config, keys, r.hw, sms))


@op
def top_logprobs(r: Recorder, logits: DeviceArray, *, ids: DeviceArray, logp: DeviceArray) -> None:
    (m, vocab), top = logits.shape, ids.shape[1]
    config = draft.Config()
    call = draft.top_logprobs(config, m, vocab, top, logits=logits.flat, live=r.counted("rows"), ids=ids.flat, logp=logp.flat)
    r.launch(call, r.device.functions(draft.SOURCE, config.defines(), draft.ENTRIES))


@op
def sample(
    r: Recorder,
    logits: DeviceArray,
    out_rows: DeviceArray,
    seq: DeviceArray,
    pos: DeviceArray,
    temperature: DeviceArray,
    top_p: DeviceArray,
    min_p: DeviceArray,
    top_k: DeviceArray,
    seed: DeviceArray,
    logprobs: DeviceArray,
    adjust_seq: DeviceArray,
    adjust_seq_by: DeviceArray,
    adjust_row: DeviceArray,
    adjust_row_by: DeviceArray,
    mask_rows: DeviceArray,
    masks: DeviceArray,
    *,
    target: DeviceArray,
    logp: DeviceArray,
    finite: DeviceArray,
    top_ids: DeviceArray,
    top_logp: DeviceArray,
) -> None:
    """The tables rise by their first column (`sample.check_tables`, on the host)."""
    dims = sampling.Dims(len(logits), logits.shape[1], top_ids.shape[1])
    _check_masks(masks, dims.V)
    named = {
        "logits": logits, "out_rows": out_rows, "seq": seq, "pos": pos, "temperature": temperature, "top_p": top_p, "min_p": min_p,
        "top_k": top_k, "seed": seed, "logprobs": logprobs, "adjust_seq": adjust_seq, "adjust_seq_by": adjust_seq_by,
        "adjust_row": adjust_row, "adjust_row_by": adjust_row_by, "mask_rows": mask_rows, "masks": masks,
        "target": target, "logp": logp, "finite": finite, "top_ids": top_ids, "top_logp": top_logp,
    }  # fmt: skip
    config = sampling.candidates(dims)[0]
    r.launch(sampling.call(dims, config, _addresses(r, named)), r.device.functions(sampling.SOURCE, config.defines(), sampling.ENTRIES))


def sample_shares(
    r: Recorder, seat: sample_ranks.Seat, keep: Any, logits: DeviceArray, drawing: Sequence[DeviceArray], outputs: Mapping[str, DeviceArray]
) -> None:
    """`sample` of logits [I, V / W], this rank's share of the vocabulary; all else is the whole's. keep: owner of the peers' memory."""
    signature = parse(OPS["sample"].signature)
    named = dict(zip((p.name for p in signature.inputs), (logits, *drawing), strict=True), **outputs)
    symbols, (rows, share) = bind("sample", signature, named), logits.shape
    if not rows:
        return
    whole = seat.config.world * share
    _check_masks(named["masks"], whole)
    with r.op("sample", symbols):
        at, top = _addresses(r, named), named["top_ids"].shape[1]
        call = sample_ranks.call(rows, share, top, seat.config, at, seat.ranks, -(-whole // 32))
        r.launch(call, r.device.functions(sample_ranks.SOURCE, seat.config.defines(), sample_ranks.ENTRIES), (keep,))


def _check_masks(masks: DeviceArray, vocab: int) -> None:
    words = -(-vocab // 32)
    if masks.size and masks.shape[1] != words:
        raise ValueError(f"sample: masks of {masks.shape[1]} words, but V = {vocab} takes {words}")


def _addresses(r: Recorder, named: Mapping[str, DeviceArray]) -> dict[str, int]:
    counts = {"live": "rows", "live_seq": "adjust_seq", "live_row": "adjust_row", "live_masks": "masks"}
    return {name: array.flat for name, array in named.items()} | {name: r.counted(count) for name, count in counts.items()}
