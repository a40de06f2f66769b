"""Long chunks in the un-absorbed form, as launches: the step's lists before the first layer, then two launches a layer."""

from __future__ import annotations

from runtime.kernels_cu import chunk_attention as family
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.recorder import Chunks, Recorder, op


@op
def split_chunks(
    r: Recorder, seq: DeviceArray, pos: DeviceArray, ctx: DeviceArray, row0: DeviceArray, least: int, room: int, *, rest: DeviceArray
) -> None:
    """The lists that this leaves are chunk_attention's, in every layer of this recording."""
    lists = r.scratch("chunk_lists", family.list_bytes(len(seq), least, room))
    at = lists | {"seq": seq.flat, "pos": pos.flat, "ctx": ctx.flat, "row0": row0.flat, "rest": rest.flat}
    r.launch(family.plan_call(len(seq), len(ctx), least, room, at), r.device.functions(family.PLAN, {}, ("split_chunks",)))
    r.chunks = Chunks(rest.flat, room, lists)


@op
def chunk_attention(
    r: Recorder,
    q: DeviceArray,
    absorbed: DeviceArray,
    cache: DeviceArray,
    w_uk: DeviceArray,
    w_uv: DeviceArray,
    pages: DeviceArray,
    page_size: int,
    ctx: DeviceArray,
    row0: DeviceArray,
    seq: DeviceArray,
    rest: DeviceArray,
    scale: float,
    value: DeviceArray,
) -> None:
    """What the rows are, ctx, row0, seq and rest, stands in the lists that split_chunks left."""
    heads, latent, nope = w_uk.shape
    sizes = (latent, absorbed.shape[2] - latent, nope, w_uv.shape[1])
    if sizes != family.BUILT_FOR:
        raise ValueError(f"chunk_attention: latent, rope, nope and value of {sizes} numbers; the kernels are built for {family.BUILT_FOR}")
    if r.chunks is None or r.chunks.rest != rest.flat:
        raise ValueError("chunk_attention: rest is not what split_chunks has written in this recording")
    dims = family.Dims(len(seq), heads, len(cache), page_size, pages.shape[1], r.chunks.room)
    config, blocks = r.choose(("chunk_attention",), family.Config), r.device.sms
    at = r.scratch("chunk_attention", family.workspace_bytes(heads, dims.room, blocks)) | dict(r.chunks.lists)
    at |= {"q": q.flat, "absorbed": absorbed.flat, "cache": cache.flat, "w_uk": w_uk.flat, "w_uv": w_uv.flat}
    at |= {"pages": pages.flat, "value": value.flat}
    r.launch(family.expand_call(dims, blocks, at), r.device.functions(family.EXPAND, {}, ("chunk_expand",)))
    functions = r.device.functions(family.ATTEND, config.defines(), ("chunk_attention",))
    r.launch(family.attend_call(dims, blocks, at, scale), functions)
