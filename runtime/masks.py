"""Token masks of a step: gathered along draft trees when it is planned, applied before its tokens are drawn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from runtime.bounded import Bounded, Late
from runtime.constraint import ConstraintState
from runtime.types import F32, I32, U32, DraftTree

LOG = logging.getLogger(__name__)
T = TypeVar("T")


MASKS_S = 1.5  # wall time of one state's masks; the state gives up by itself between two nodes after 1 s (model/grammar.py)
_LOCAL = threading.local()


def fill_masks(items: Iterable[tuple[ConstraintState, int, DraftTree]]) -> tuple[I32, U32]:
    """Builds a StepPlan's mask_rows [g] i32, rising, and masks [g, W] u32.

    items: (state, row of the tree's root, tree), rows rising. Whatever one state raises is noted in
    its `error`, and so is taking longer than MASKS_S; it then masks nothing, and the cycle ends its
    request before a token is kept.
    """
    sound = [item for item in items if item[0].error is None]
    rows, masks = [np.zeros(0, np.int32)], []
    results = _bounded().run([partial(state.masks, tree) for state, _, tree in sound]) if sound else []
    for (state, first_row, _), found in zip(sound, results, strict=True):
        if isinstance(found, BaseException):
            LOG.error("a constraint failed", exc_info=found)
            state.error = "its masks took too long" if isinstance(found, Late) else "the constraint failed"
            continue
        nodes, bits = found
        rows.append(nodes + np.int32(first_row))
        masks.append(bits)
    return np.concatenate(rows), np.concatenate(masks) if masks else np.zeros((0, 0), np.uint32)


def _bounded() -> Bounded[tuple[I32, U32]]:
    """The calling thread's own: each engine steps in one thread."""
    found: Bounded[tuple[I32, U32]] | None = getattr(_LOCAL, "bounded", None)
    if found is None:
        found = _LOCAL.bounded = Bounded(MASKS_S, "masks")
    return found


def prune(state: ConstraintState | None, tree: DraftTree) -> DraftTree:
    """The tree without nodes that could not be accepted: their rows would be verified for nothing."""
    if state is None or len(tree) == 1:
        return tree
    return _guarded(state, lambda: state.prune(tree)) or tree


def push(state: ConstraintState | None, tokens: Sequence[int]) -> None:
    """Moves a state on by committed tokens."""
    if state is not None:
        _guarded(state, lambda: state.push(tokens))


def _guarded(state: ConstraintState, call: Callable[[], T]) -> T | None:
    """What a state says, or None once it has failed: one request's grammar never ends a step of all."""
    if state.error is not None:
        return None
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is no Exception
        LOG.exception("a constraint failed")
        state.error = "the constraint failed"
        return None


def apply_masks(logits: F32, row_index: I32, mask_rows: I32, masks: U32) -> None:
    """Sets logits [r, V] f32 of forbidden tokens to -inf, in place.

    row_index: [r] the plan's row of each logits row, rising; mask_rows: [g], all of them among those.
    """
    if not len(mask_rows):
        return
    at = np.searchsorted(row_index, mask_rows)
    allowed = np.unpackbits(np.ascontiguousarray(masks, "<u4").view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    logits[at] = np.where(allowed > 0, logits[at], np.float32(-np.inf))
