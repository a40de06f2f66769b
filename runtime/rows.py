"""Shares of a step, and the StepPlan they make together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from runtime.adjust import fill_adjustments
from runtime.bits import chain_bits
from runtime.config import EngineConfig
from runtime.grove import Grove
from runtime.masks import fill_masks
from runtime.sequence import Sequence
from runtime.tables import PageTables
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
    trees: SequenceOf[DraftTree]  # its own is number `at`
    at: int = 0

    @property
    def tree(self) -> DraftTree | None:
        return self.trees[self.at] if self.nodes else None

    @property
    def count(self) -> int:
        return self.before + self.nodes


@dataclass(frozen=True, slots=True)
class _Lines:
    """How a step's rows lie: the same as long as every sequence has as many."""

    before: list[int]
    nodes: list[int]
    row0: I32  # [B]
    seq: I32  # [m]
    place: I32  # [m] within its sequence
    out_rows: I32  # [r]
    words: int
    alone: U64  # [m, 1] what rows see that see themselves alone

    @staticmethod
    def of(before: list[int], nodes: list[int]) -> _Lines:
        counts = np.array(before, np.int32) + np.array(nodes, np.int32)
        row0 = np.cumsum(counts, dtype=np.int32) - counts
        seq = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        place = np.arange(len(seq), dtype=np.int32) - row0[seq]
        wanted = place >= np.array(before, np.int32)[seq]
        wanted &= np.array(nodes, np.bool_)[seq]
        out_rows = np.flatnonzero(wanted).astype(np.int32)
        return _Lines(before, nodes, row0, seq, place, out_rows, -(-int(counts.max()) // WORD_BITS), np.ones((len(seq), 1), np.uint64))


@dataclass(frozen=True, slots=True)
class _Spots:
    """Where rows lie in the cache; good for the same starts, lines and page tables."""

    starts: list[int]
    lines: _Lines
    pages: I32
    ctx: I32  # [B]
    base: I32  # [m] ctx of its sequence
    at: I32  # [m] the position whose slot a row writes to
    slot: I32  # [m]


class Planner:
    """Makes step plans. What they have in common is kept from one step to the next: sampling values, page tables, how rows lie."""

    def __init__(self, page_size: int, config: EngineConfig, tables: PageTables) -> None:
        self._page_size, self._config, self._tables = page_size, config, tables
        self._batch: list[Sequence] = []
        self._sampling: dict[str, Array] = {}
        self._pages: I32 = np.zeros((0, 0), np.int32)
        self._adjusted: list[int] = []  # places in the batch of those that may have adjustments
        self._held: list[int] = []  # and of those with a constraint
        self._lines = _Lines.of([0], [1])
        self._ahead: _Spots | None = None  # of the next step, perhaps

    @property
    def bent(self) -> bool:
        """Whether some sequence of the last batch has a constraint, or adjustments, which its history decides."""
        return bool(self._adjusted or self._held)

    def plan(self, shares: SequenceOf[Share], moves: I32) -> tuple[StepPlan, Grove]:
        """Lays the shares' rows one after another: m rows, B = len(shares) sequences. Their trees, in order, too.

        moves: [n, 2] i32 slots (from, to) that the last step left to do. Decoding shares come first, as
        the scheduler orders them: their rows are then laid out in one pass.
        """
        batch = [share.sequence for share in shares]
        if batch != self._batch:
            self._batch, self._sampling = batch, _sampling_of(batch)
            self._adjusted = [b for b, sequence in enumerate(batch) if sequence.history.active]  # who is not stays so
            self._held = [b for b, sequence in enumerate(batch) if sequence.constraint is not None]
        self._pages = self._tables.of(batch)
        lines, before, nodes = self._lines, [share.before for share in shares], [share.nodes for share in shares]
        if nodes != lines.nodes or before != lines.before:
            lines = self._lines = _Lines.of(before, nodes)
        spots = self._spots([share.start for share in shares])
        at = spots.at
        grove = _grove_of(shares)
        if not any(before):
            token = grove.token
            pos, ancestors = (at, lines.alone) if grove.bare else (spots.base + grove.depth, grove.ancestors(lines.words))
        else:
            token, pos, ancestors = _fill_chunks(shares, grove, lines, at)
        adjust, (mask_rows, masks) = self._bends(shares, lines.row0)
        plan = StepPlan(
            bucket=self._config.bucket_for(len(token)),
            token=token,
            pos=pos,
            slot=spots.slot,
            seq=lines.seq,
            ancestors=ancestors,
            ctx=spots.ctx,
            row0=lines.row0,
            pages=self._pages,
            moves=moves,
            out_rows=lines.out_rows,
            adjust_seq=adjust[0],
            adjust_seq_by=adjust[1],
            adjust_row=adjust[2],
            adjust_row_by=adjust[3],
            mask_rows=mask_rows,
            masks=masks,
            **self._sampling,
        )
        return plan, grove

    def foresee(self, starts: list[int]) -> None:
        """Works out where the rows of the next step lie if the sequences of the last one begin there and have as many: most of a plan."""
        lines = self._lines
        if max(start + nodes for start, nodes in zip(starts, lines.nodes, strict=True)) <= self._pages.shape[1] * self._page_size:
            self._ahead = self._spots(starts)

    @property
    def nodes(self) -> list[int]:
        """Of the last step's trees, roots included, by place in the batch."""
        return self._lines.nodes

    def get_ready(self, shares: SequenceOf[Share]) -> None:
        """As `foresee`, for sequences that hold the pages for trees of as many nodes as the last step's."""
        if shares and [share.sequence for share in shares] == self._batch and not any(self._lines.before):
            self._pages = self._tables.of(self._batch)
            self.foresee([share.start for share in shares])

    def _spots(self, starts: list[int]) -> _Spots:
        lines, ahead = self._lines, self._ahead
        if ahead is not None and ahead.starts == starts and ahead.lines is lines and ahead.pages is self._pages:
            return ahead
        ctx = np.array(starts, np.int32)
        base = ctx.take(lines.seq)
        at = base + lines.place
        page, place = np.divmod(at, np.int32(self._page_size))
        slot = self._pages[lines.seq, page] * np.int32(self._page_size) + place
        return _Spots(starts, lines, self._pages, ctx, base, at, slot)

    def _bends(self, shares: SequenceOf[Share], row0: I32) -> tuple[tuple[I32, F32, I32, F32], tuple[I32, U32]]:
        """The adjustments and masks of those sequences that have any."""
        adjusted = [(b, shares[b]) for b in self._adjusted if shares[b].nodes]
        held = [(b, shares[b]) for b in self._held if shares[b].nodes]
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


def _grove_of(shares: SequenceOf[Share]) -> Grove:
    """The trees of all shares that have one, in order: most often just those that came together."""
    owners, trees = [share for share in shares if share.nodes], shares[0].trees
    if isinstance(trees, Grove) and len(trees) == len(owners) and all(share.trees is trees for share in owners):
        return trees
    return Grove.of([share.trees[share.at] for share in owners])


def _fill_chunks(shares: SequenceOf[Share], grove: Grove, lines: _Lines, at: I32) -> tuple[I32, I32, U64]:
    """token [m], pos [m] and ancestors [m, W] where chunks follow the trees; `at` is pos where nothing branches."""
    trees = sum(share.before == 0 for share in shares)
    row = sum(grove.sizes[:trees])
    pos, ancestors, tokens = at.copy(), np.zeros((len(at), lines.words), np.uint64), [grove.token[:row]]
    pos[:row] += (grove.depth - grove.lines.node)[:row].astype(np.int32)
    ancestors[:row] = grove.ancestors(lines.words)[:row]
    for share in shares[trees:]:
        if share.before == 0:
            raise RuntimeError(f"sequence {share.sequence.id}: a tree after a chunk; trees come first in a plan")
        count = share.count
        tokens.append(share.sequence.tokens[share.start : share.start + count])
        ancestors[row : row + count] = chain_bits(count, lines.words)
        row += count
    return np.concatenate(tokens), pos, ancestors
