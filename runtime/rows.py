"""Shares of a step, and the StepPlan they make together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from runtime.adjust import fill_adjustments
from runtime.bits import chain_bits, forest_bits
from runtime.config import EngineConfig
from runtime.masks import fill_masks
from runtime.sequence import Sequence
from runtime.types import F32, I32, U32, U64, Array, DraftTree, StepPlan

WORD_BITS = 64
NONE = fill_adjustments(())
NO_MASKS = fill_masks(())


@dataclass(slots=True)
class Share:
    """The rows of one sequence in a step: `before` tokens from position `start` on, then a tree.

    A chunk that reaches the newest token ends in a tree of that one node; a chunk that stops short
    has no tree and nothing is drawn from it; a decoding sequence has `before` 0. Node i of the tree
    sits in the slot of position start + before + i until the accepted ones are moved together.
    """

    sequence: Sequence
    start: int  # = sequence.computed when the step was planned
    before: int
    nodes: int  # of the tree, root included; 0: no tree
    tree: DraftTree | None

    @property
    def count(self) -> int:
        return self.before + self.nodes


class Planner:
    """Makes step plans. What a batch's plans have in common is kept from one step to the next: sampling values and page tables."""

    def __init__(self, page_size: int, config: EngineConfig) -> None:
        self._page_size, self._config = page_size, config
        self._batch: list[Sequence] = []
        self._edits: list[int] = []  # Sequence.page_edits as the tables show them
        self._sampling: dict[str, Array] = {}
        self._pages: I32 = np.zeros((0, 0), np.int32)

    def plan(self, shares: SequenceOf[Share], moves: I32) -> StepPlan:
        """Lays the shares' rows one after another: m rows, B = len(shares) sequences.

        moves: [n, 2] i32 slots (from, to) that the last step left to do. Decoding shares come first, as
        the scheduler orders them: their rows are then laid out in one pass.
        """
        batch = [share.sequence for share in shares]
        edits = [sequence.page_edits for sequence in batch]
        if batch != self._batch:
            self._batch, self._edits, self._sampling = batch, [], _sampling_of(batch)
        if edits != self._edits:
            self._edits, self._pages = edits, _page_tables(batch)
        counts = np.array([share.before + share.nodes for share in shares], np.int32)
        row0 = np.cumsum(counts, dtype=np.int32) - counts
        m, ctx = int(row0[-1]) + shares[-1].count, np.array([share.start for share in shares], np.int32)
        seq = np.repeat(np.arange(len(shares), dtype=np.int32), counts)
        at = np.arange(m, dtype=np.int32) + (ctx - row0)[seq]  # the position whose slot a row writes to
        page, place = np.divmod(at, np.int32(self._page_size))
        token, pos, ancestors, out_rows = _fill_rows(shares, at, int(counts.max()))
        adjust, (mask_rows, masks) = self._tables(shares, row0)
        return StepPlan(
            bucket=self._config.bucket_for(m),
            token=token,
            pos=pos,
            slot=self._pages[seq, page] * np.int32(self._page_size) + place,
            seq=seq,
            ancestors=ancestors,
            ctx=ctx,
            row0=row0,
            pages=self._pages,
            moves=moves,
            out_rows=out_rows,
            adjust_seq=adjust[0],
            adjust_seq_by=adjust[1],
            adjust_row=adjust[2],
            adjust_row_by=adjust[3],
            mask_rows=mask_rows,
            masks=masks,
            **self._sampling,
        )

    def _tables(self, shares: SequenceOf[Share], row0: I32) -> tuple[tuple[I32, F32, I32, F32], tuple[I32, U32]]:
        """The adjustments and masks of those sequences that have any."""
        adjusted = [(b, share) for b, share in enumerate(shares) if share.tree is not None and share.sequence.history.active]
        held = [(b, share) for b, share in enumerate(shares) if share.tree is not None and share.sequence.constraint is not None]
        adjust, masks = NONE, NO_MASKS
        if adjusted:
            adjust = fill_adjustments((b, s.sequence.history, int(row0[b]) + s.before, s.tree) for b, s in adjusted if s.tree is not None)
        if held:
            states = [(s.sequence.constraint, int(row0[b]) + s.before, s.tree) for b, s in held]
            masks = fill_masks((state, row, tree) for state, row, tree in states if state is not None and tree is not None)
        return adjust, masks


def _sampling_of(batch: SequenceOf[Sequence]) -> dict[str, Array]:
    """The sampling fields of a plan, [B] each."""
    params = [sequence.params for sequence in batch]
    return {
        "seed": np.array([sequence.request.seed for sequence in batch], np.uint64),
        "temperature": np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "logprobs": np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
    }


def _page_tables(batch: SequenceOf[Sequence]) -> I32:
    """[B, P], padded with the null page. A new array each time: plans that were handed over keep theirs."""
    pages = np.zeros((len(batch), max(sequence.page_count for sequence in batch)), np.int32)
    for row, sequence in zip(pages, batch, strict=True):
        row[: sequence.page_count] = sequence.pages
    return pages


def _fill_rows(shares: SequenceOf[Share], at: I32, longest: int) -> tuple[I32, I32, U64, I32]:
    """token [m], pos [m] and ancestors [m, W] of all rows, and those [r] whose next token is wanted; `at` is pos where nothing branches."""
    words = -(-longest // WORD_BITS)
    trees = [share.tree for share in shares if share.before == 0 and share.tree is not None]
    chunks = shares[len(trees) :]
    tokens = [tree.token for tree in trees]
    row = sum(map(len, tokens))
    if row == len(at) == len(trees):  # plain decoding
        return np.concatenate(tokens), at, np.ones((row, 1), np.uint64), np.arange(row, dtype=np.int32)
    ancestors = np.zeros((len(at), words), np.uint64)
    wanted = np.ones(len(at), np.bool_)
    pos = at.copy()
    if row > len(trees):
        ancestors[:row] = forest_bits([tree.parent for tree in trees], words)
        first = np.repeat(np.array([share.start for share in shares[: len(trees)]], np.int32), [len(t) for t in tokens])
        pos[:row] = first + np.concatenate([tree.depth for tree in trees])
    else:
        ancestors[:row, 0] = 1
    for share in chunks:
        if share.before == 0:
            raise RuntimeError(f"sequence {share.sequence.id}: a tree after a chunk; trees come first in a plan")
        count = share.count
        tokens.append(share.sequence.tokens[share.start : share.start + count])
        ancestors[row : row + count] = chain_bits(count, words)
        wanted[row : row + share.before] = False
        row += count
    return np.concatenate(tokens), pos, ancestors, np.flatnonzero(wanted).astype(np.int32)
