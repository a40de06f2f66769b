"""Private pages for the paths of draft trees: what makes a tree's rows equal plain decoding bit for bit, as calls of tree_paths.cu.

    path_plan (once a step) -> tree_mla_plan -> path_copy -> tree_mla (each layer)

A row that does not see all nodes before it becomes a sequence of its own; rows of chains stay as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from runtime.kernels_cu._call import Call, blocks
from runtime.kernels_cu.tree_mla_config import MOST_SEQUENCES, Dims
from runtime.types import StepPlan

SOURCE = "tree_paths.cu"
ENTRIES = ("path_plan", "path_copy")
PLANNERS, COPIERS, KEYS = 128, 288, 4  # kPlanners, kCopiers, kKeys
_WAVES = 4  # blocks of path_copy an SM, where its rows have keys for so many
_MOST_SLOTS = 1 << 31  # a slot is an int


class PlanParams(ctypes.Structure):
    """`PathPlan` of tree_paths.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ctx", "row0", "seq", "pages", "ancestors")),
        *((name, ctypes.c_void_p) for name in ("own_ctx", "own_row0", "own_seq", "own_pages", "keys", "source")),
        *((name, ctypes.c_int) for name in ("page_size", "pages_each", "words", "room")),
    ]  # fmt: skip


class CopyParams(ctypes.Structure):
    """`PathCopy` of tree_paths.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cache", "own_ctx", "keys", "source", "own_pages")),
        *((name, ctypes.c_int) for name in ("page_size", "pages_each", "room", "first")),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PathPages:
    """Private pages of every row of a step: rows, the most of a step; deepest: depth of a tree's deepest node, its root 0."""

    rows: int
    deepest: int
    page_size: int

    def check(self) -> None:
        """Raises ValueError naming the number that is out of range."""
        if not 1 <= self.rows <= MOST_SEQUENCES:
            raise ValueError(
                f"max_num_batched_tokens: {self.rows} rows; with batch_invariant a row of a draft tree is a sequence of its own, and "
                f"attention takes {MOST_SEQUENCES}: lower it, or take chains (speculative_config method 'dflash' or 'none')"
            )
        if self.deepest < 1 or self.page_size < 1:
            raise ValueError(f"tree_paths: deepest = {self.deepest}, page_size = {self.page_size}; both must be at least 1")

    @property
    def each(self) -> int:
        """Pages of a row: what its context leaves in a page, at most page_size - 1 keys, then deepest + 1 of the path."""
        return blocks(self.page_size + self.deepest, self.page_size)

    @property
    def slots(self) -> int:
        """Cache rows behind the last layer, one set for all layers."""
        return self.rows * self.each * self.page_size


def check_plan(plan: StepPlan, paths: PathPages | None) -> None:
    """Raises ValueError for trees that would not have the bits of plain decoding: there are no private pages, or too small ones."""
    depth = plan.pos - plan.ctx[plan.seq]
    tree = depth != np.arange(plan.m, dtype=np.int32) - plan.row0[plan.seq]
    if not tree.any():
        return
    if paths is None:
        raise ValueError(
            "step plan: it holds a draft tree, but with batch_invariant this executor verifies chains only: "
            "load it with speculative_config method 'ddtree'"
        )
    if int(depth[tree].max()) > paths.deepest:
        raise ValueError(f"step plan: a draft tree of depth {int(depth[tree].max())}, private pages hold paths of depth {paths.deepest}")


def workspace_bytes(dims: Dims, paths: PathPages) -> dict[str, int]:
    """Bytes of each array of a bucket, by the kernels' names."""
    each = {name: 4 * dims.M for name in ("own_ctx", "own_row0", "own_seq", "keys")}
    return each | {"own_pages": 4 * dims.M * dims.pages_each, "source": 4 * dims.M * paths.each * paths.page_size}


def plan_call(dims: Dims, paths: PathPages, at: Mapping[str, int]) -> Call:
    """Once a step. at: address by name: ctx, row0, seq, pages, ancestors of the plan, and `workspace_bytes`."""
    names = ("ctx", "row0", "seq", "pages", "ancestors", "own_ctx", "own_row0", "own_seq", "own_pages", "keys", "source")
    sizes = (paths.page_size, dims.pages_each, dims.words, paths.each * paths.page_size)
    return Call("path_plan", (dims.M, 1, 1), PLANNERS, 0, (PlanParams(*(at[name] for name in names), *sizes),))


def copy_call(dims: Dims, paths: PathPages, at: Mapping[str, int], first: int, sms: int) -> Call:
    """A layer's copies. at: as in `plan_call`, and cache: of the layer; first: its private pages' first, counted from its own first."""
    if (first + paths.rows * paths.each) * paths.page_size >= _MOST_SLOTS:
        raise ValueError(f"tree_paths: private pages begin at page {first} of a layer; {_MOST_SLOTS} slots are what an index reaches")
    room = paths.each * paths.page_size
    params = CopyParams(
        *(at[name] for name in ("cache", "own_ctx", "keys", "source", "own_pages")), paths.page_size, dims.pages_each, room, first
    )  # fmt: skip
    spread = max(1, min(blocks(room, KEYS), blocks(_WAVES * sms, dims.M)))
    return Call("path_copy", (dims.M, spread, 1), COPIERS, 0, (params,))
