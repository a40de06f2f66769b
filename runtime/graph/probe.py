"""Plans that fill a bucket, to time it: streams of equal length, chains or trees of rows, greedy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from runtime.bits import chain_bits, forest_bits
from runtime.chunks import TILE
from runtime.types import I32, DraftPlan, StepPlan


@dataclass(frozen=True, slots=True)
class Probe:
    """streams sequences of ctx committed tokens each; their pages start over where there are too few (then they share slots).
    deepest: of the draft trees that their rows are; 0: chains."""

    streams: int
    ctx: int
    vocab: int
    num_pages: int
    page_size: int
    deepest: int = 0

    def pages(self, streams: int, positions: int) -> I32:
        """[B, P], page 0 left out."""
        each = -(-positions // self.page_size)
        return (1 + np.arange(streams * each) % max(self.num_pages - 1, 1)).astype(np.int32).reshape(streams, each)

    def counts(self, rows: int) -> I32:
        """Rows of each of at most `streams` sequences."""
        streams = min(self.streams, rows)
        counts = np.full(streams, rows // streams, np.int32)
        counts[: rows % streams] += 1
        return counts

    def step(self, rows: int, out_rows: int) -> StepPlan:
        """A plan of exactly `rows` rows in at most `streams` sequences, of which the last out_rows want a token."""
        counts = self.counts(rows)
        token = (np.arange(rows, dtype=np.int64) * 7919 % self.vocab).astype(np.int32)
        wanted = np.arange(rows - min(out_rows, rows), rows, dtype=np.int32)
        pages = self.pages(len(counts), self.ctx + int(counts.max()))
        plan = chains(counts, np.full(len(counts), self.ctx, np.int32), token, pages, self.page_size, wanted)
        return trees(plan, counts, self.deepest) if self.deepest else plan

    def draft(self, streams: int, taps: int) -> DraftPlan:
        """A plan of that many roots and taps."""
        tap = np.arange(taps, dtype=np.int32)
        root = (np.arange(streams, dtype=np.int64) * 7919 % self.vocab).astype(np.int32)
        slots = self.page_size + tap % max((self.num_pages - 1) * self.page_size, 1)
        return DraftPlan(root, np.full(streams, self.ctx, np.int32), self.pages(streams, self.ctx + 1), tap, tap, slots.astype(np.int32))

    def known(self, rows: int, least: int = 0, room: int = 0) -> dict[str, float]:
        """What a step's costs need beyond shapes: keys over the batch, keys over all rows, and those of rows in long chunks.

        least, room: as split_chunks has them; room 0: all rows are attended absorbed.
        """
        taken, left, total = np.zeros(3), room // TILE, np.zeros(3)
        for count in self.counts(rows).tolist():
            each = np.array([count, self.ctx + count, count * self.ctx + count * (count + 1) / 2])  # rows, keys, keys of all rows
            tiles, chain = -(-(self.ctx + count) // TILE), not self.deepest or count <= self.deepest + 1
            total += each
            if count >= least and chain and tiles <= left:
                taken += each
                left -= tiles
        chunks = dict(zip(("chunk_rows", "chunk_keys", "chunk_row_keys"), taken.tolist(), strict=True))
        return {"keys": float(total[1]), "row_keys": float(total[2]), **chunks}


def chains(counts: I32, ctx: I32, token: I32, pages: I32, page_size: int, out_rows: I32) -> StepPlan:
    """A greedy plan of chains: stream b has counts[b] > 0 rows after ctx[b] committed tokens, pages [B, P]; token [sum of counts]."""
    rows, streams = len(token), len(counts)
    row0 = (np.cumsum(counts) - counts).astype(np.int32)
    seq = np.repeat(np.arange(streams, dtype=np.int32), counts)
    at = (ctx - row0)[seq] + np.arange(rows, dtype=np.int32)
    bits = np.zeros((rows, -(-int(counts.max()) // 64)), np.uint64)
    for first, count in zip(row0.tolist(), counts.tolist(), strict=True):
        bits[first : first + count] = chain_bits(count, bits.shape[1])
    zero, none = np.zeros(streams, np.float32), np.zeros((0, 2), np.int32)
    return StepPlan(
        bucket=rows,
        token=token,
        pos=at.astype(np.int32),
        slot=(pages[seq, at // page_size] * page_size + at % page_size).astype(np.int32),
        seq=seq,
        ancestors=bits,
        ctx=ctx,
        row0=row0,
        pages=pages,
        moves=none,
        out_rows=out_rows,
        seed=np.zeros(streams, np.uint64),
        temperature=zero,
        top_p=zero + 1,
        min_p=zero,
        top_k=np.zeros(streams, np.int32),
        logprobs=np.full(streams, -1, np.int32),
        adjust_seq=none,
        adjust_seq_by=none.astype(np.float32),
        adjust_row=none,
        adjust_row_by=none.astype(np.float32),
        mask_rows=np.zeros(0, np.int32),
        masks=np.zeros((0, 0), np.uint32),
    )


def trees(plan: StepPlan, counts: I32, deepest: int) -> StepPlan:
    """The same rows as draft trees: one line down to `deepest`, all further nodes below those of the line in turn."""
    parents = [[j - 1 if j <= deepest else (j - deepest - 1) % deepest for j in range(count)] for count in counts.tolist()]
    bits = forest_bits([np.array(one, np.int32) for one in parents], plan.ancestors.shape[1])
    depth = np.bitwise_count(bits).sum(1, dtype=np.int32) - 1
    return replace(plan, ancestors=bits, pos=plan.ctx[plan.seq] + depth)


def empty_plans() -> tuple[StepPlan, DraftPlan]:
    """Plans without a row, a root or a tap: every row of a bucket is dead."""
    one = Probe(1, 0, 1, 2, 1)
    step, draft = one.step(1, 1), one.draft(0, 0)
    cut = {field.name: getattr(step, field.name)[:0] for field in fields(step) if field.name != "bucket"}
    return replace(step, bucket=0, **cut), draft
