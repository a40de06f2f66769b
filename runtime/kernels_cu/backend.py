"""The CUDA reading of the vocabulary: every op becomes prepared launches, which nothing runs until its caller does.

    with backend.recording(alive=seq, live=Live(rows=…, moves=…)) as launches:
        logits, taps = model.step(backend, comm, fields)     # fields: a plan whose arrays are DeviceArrays
    for one in launches:
        one.run.run(device.stream)                           # eagerly, or while the stream is captured

Record every bucket, the largest first, then `seal`. Buffers, scratch and caches keep their addresses from then on, so what one
recording leaves (taps) another reads. Rows that are dead may hold anything, NaN included, and nothing live reads them.
"""

from __future__ import annotations

from runtime.kernels_cu import record_attention, record_chunks, record_draft, record_linear, record_moe, record_rows
from runtime.kernels_cu.recorder import Recorder


class CudaBackend(Recorder):
    """Ops as methods that record; memory, `recording`, `seal` and `recorded` are `Recorder`'s."""

    name = "cuda"

    embed = record_rows.embed
    rms_norm = record_rows.rms_norm
    add_rms_norm = record_rows.add_rms_norm
    silu_mul = record_rows.silu_mul
    copy = record_rows.copy
    gather_rows = record_rows.gather_rows
    kv_move = record_rows.kv_move
    mla_latent = record_rows.mla_latent
    linear = record_linear.linear
    linear_f32 = record_linear.linear_f32
    mla_query = record_linear.mla_query
    mla_value = record_linear.mla_value
    tree_mla = record_attention.tree_mla
    split_chunks = record_chunks.split_chunks
    chunk_attention = record_chunks.chunk_attention
    route = record_moe.route
    moe_w4 = record_moe.moe_w4
    sample = record_draft.sample
    head_norm_rope = record_draft.head_norm_rope
    kv_write = record_draft.kv_write
    block_attention = record_draft.block_attention
    top_logprobs = record_draft.top_logprobs
