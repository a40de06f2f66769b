"""Token masks of a step: gathered along draft trees when it is planned, applied before its tokens are drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from runtime.constraint import ConstraintState
from runtime.types import F32, I32, U32, DraftTree

LOG = logging.getLogger(__name__)


def fill_masks(items: Iterable[tuple[ConstraintState, int, DraftTree]]) -> tuple[I32, U32]:
    """Builds a StepPlan's mask_rows [g] i32, rising, and masks [g, W] u32.

    items: (state, row of the tree's root, tree), rows rising. Whatever one state raises is noted in
    its `error`; it then masks nothing, and the cycle ends its request before a token is kept.
    """
    rows, masks = [np.zeros(0, np.int32)], []
    for state, first_row, tree in items:
        if state.error is not None:
            continue
        try:
            nodes, bits = state.masks(tree)
        except Exception:
            LOG.exception("a constraint failed")
            state.error = "the constraint failed"
            continue
        rows.append(nodes + np.int32(first_row))
        masks.append(bits)
    return np.concatenate(rows), np.concatenate(masks) if masks else np.zeros((0, 0), np.uint32)


def prune(state: ConstraintState | None, tree: DraftTree) -> DraftTree:
    """The tree without nodes that could not be accepted: their rows would be verified for nothing."""
    if state is None or state.error is not None or len(tree) == 1:
        return tree
    try:
        return state.prune(tree)
    except Exception:
        LOG.exception("a constraint failed")
        state.error = "the constraint failed"
        return tree


def apply_masks(logits: F32, row_index: I32, mask_rows: I32, masks: U32) -> None:
    """Sets logits [r, V] f32 of forbidden tokens to -inf, in place.

    row_index: [r] the plan's row of each logits row, rising; mask_rows: [g], all of them among those.
    """
    if not len(mask_rows):
        return
    at = np.searchsorted(row_index, mask_rows)
    allowed = np.unpackbits(np.ascontiguousarray(masks, "<u4").view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    logits[at] = np.where(allowed > 0, logits[at], np.float32(-np.inf))
