"""Shares of a step, and the StepPlan they make together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from runtime.adjust import fill_adjustments
from runtime.config import EngineConfig
from runtime.masks import fill_masks
from runtime.sequence import Sequence
from runtime.tree import chain_bits, forest_bits
from runtime.types import F32, I32, U64, Bools, DraftTree, StepPlan

WORD_BITS = 64


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


def make_step_plan(shares: SequenceOf[Share], moves: I32, page_size: int, config: EngineConfig) -> StepPlan:
    """Lays the shares' rows one after another: m rows, B = len(shares) sequences.

    moves: [n, 2] i32 slots (from, to) that the last step left to do. Decoding shares come first, as
    the scheduler orders them: their rows are then laid out in one pass.
    """
    counts = np.array([share.before + share.nodes for share in shares], np.int32)
    m, row0 = int(counts.sum()), np.cumsum(counts, dtype=np.int32) - counts
    ctx = np.array([share.start for share in shares], np.int32)
    seq = np.repeat(np.arange(len(shares), dtype=np.int32), counts)
    at = np.arange(m, dtype=np.int32) + (ctx - row0)[seq]  # the position whose slot a row writes to
    pages = np.zeros((len(shares), max(share.sequence.page_count for share in shares)), np.int32)
    for b, share in enumerate(shares):
        pages[b, : share.sequence.page_count] = share.sequence.pages
    token, pos, ancestors, wanted = _fill_rows(shares, at, int(counts.max()))
    adjust = fill_adjustments(
        (b, share.sequence.history, int(row0[b]) + share.before, share.tree) for b, share in enumerate(shares) if share.tree is not None
    )
    mask_rows, masks = fill_masks(
        (share.sequence.constraint, int(row0[b]) + share.before, share.tree)
        for b, share in enumerate(shares)
        if share.tree is not None and share.sequence.constraint is not None
    )
    sampled = [share.sequence.params for share in shares]
    return StepPlan(
        bucket=config.bucket_for(m),
        token=token,
        pos=pos,
        slot=(pages[seq, at // page_size] * page_size + at % page_size).astype(np.int32),
        seq=seq,
        ancestors=ancestors,
        ctx=ctx,
        row0=row0,
        pages=pages,
        moves=moves,
        out_rows=np.flatnonzero(wanted).astype(np.int32),
        seed=np.array([share.sequence.request.seed for share in shares], np.uint64),
        temperature=_floats([0.0 if p.greedy else p.temperature for p in sampled]),
        top_p=_floats([p.top_p for p in sampled]),
        min_p=_floats([p.min_p for p in sampled]),
        top_k=np.array([p.top_k for p in sampled], np.int32),
        logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in sampled], np.int32),
        adjust_seq=adjust[0],
        adjust_seq_by=adjust[1],
        adjust_row=adjust[2],
        adjust_row_by=adjust[3],
        mask_rows=mask_rows,
        masks=masks,
    )


def _floats(values: list[float]) -> F32:
    return np.array(values, np.float32)


def _fill_rows(shares: SequenceOf[Share], at: I32, longest: int) -> tuple[I32, I32, U64, Bools]:
    """token [m], pos [m] and ancestors [m, W] of all rows, and whose next token is wanted [m]; `at` is pos where nothing branches."""
    words = -(-longest // WORD_BITS)
    ancestors = np.zeros((len(at), words), np.uint64)
    wanted = np.ones(len(at), np.bool_)
    pos = at.copy()
    trees = [share.tree for share in shares if share.before == 0 and share.tree is not None]
    chunks = shares[len(trees) :]
    tokens = [tree.token for tree in trees]
    row = sum(map(len, tokens))
    if trees:
        ancestors[:row] = forest_bits([tree.parent for tree in trees], words)
    if row > len(trees):
        first = np.repeat(np.array([share.start for share in shares[: len(trees)]], np.int32), [len(t) for t in tokens])
        pos[:row] = first + np.concatenate([tree.depth for tree in trees])
    for share in chunks:
        if share.before == 0:
            raise RuntimeError(f"sequence {share.sequence.id}: a tree after a chunk; trees come first in a plan")
        count = share.count
        tokens.append(share.sequence.tokens[share.start : share.start + count])
        ancestors[row : row + count] = chain_bits(count, words)
        wanted[row : row + share.before] = False
        row += count
    return np.concatenate(tokens), pos, ancestors, wanted
