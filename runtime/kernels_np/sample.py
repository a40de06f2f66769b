"""Sampling as an op: `runtime.sampling` defines it, this writes it into the step's buffers."""

from __future__ import annotations

import numpy as np

from runtime import sampling
from runtime.masks import apply_masks
from runtime.types import F32, I32, U32, U64, Bools


def sample(
    logits: F32,
    out_rows: I32,
    seq: I32,
    pos: I32,
    temperature: F32,
    top_p: F32,
    min_p: F32,
    top_k: I32,
    seed: U64,
    logprobs: I32,
    adjust_seq: I32,
    adjust_seq_by: F32,
    adjust_row: I32,
    adjust_row_by: F32,
    mask_rows: I32,
    masks: U32,
    *,
    target: I32,
    logp: F32,
    finite: Bools,
    top_ids: I32,
    top_logp: F32,
) -> None:
    stream = seq[out_rows]
    finite[:] = sampling.is_finite_rows(logits)
    if not finite.all():
        logits = np.where(finite[:, None], logits, np.float32(0.0))
    adjusted = logits
    if len(adjust_seq) or len(adjust_row) or len(mask_rows):
        adjusted = logits.copy()
        sampling.apply_adjustments(adjusted, stream, out_rows, adjust_seq, adjust_seq_by, adjust_row, adjust_row_by)
        apply_masks(adjusted, out_rows, mask_rows, masks)
    target[:] = sampling.draw(
        adjusted,
        temperature=temperature[stream],
        top_p=top_p[stream],
        min_p=min_p[stream],
        top_k=top_k[stream],
        seed=seed[stream],
        pos=pos[out_rows].astype(np.int64) + 1,
    )
    wanted = logprobs[stream] >= 0
    if wanted.any():
        logp[wanted] = sampling.log_softmax_at(logits[wanted], target[wanted])
        if top_ids.shape[1]:
            top_ids[wanted], top_logp[wanted] = sampling.top_logprobs(logits[wanted], top_ids.shape[1])
