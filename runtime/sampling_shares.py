"""Sampling over ranks that hold a share of the vocabulary each: the tokens of `runtime.sampling`, without anybody's whole logits.

Every rank is told the same and decides the same, so none sends a token to another. What a row costs in exchanges:

  argmax         one: each rank's best token, whether its logits are finite, the log of its sum of exponentials
  a draw         one more: each rank's best score. It can not ride in the first: d = (logit - largest) / temperature is rounded, and
                 only with the largest logit of all ranks does a share have the bits of the whole
  top_k, top_p   a search for the place in the one order (d falling, id rising) where the filter cuts: what a rank has up to each of
                 1,024 places, added up, tells which stretch holds the cut; five rounds settle key and id. Weights are integers (counts,
                 masses of 2^40), so their sums are exact in any order and the place is the whole vocabulary's. min_p needs none.
  alternatives   one: each rank's n likeliest

Tokens are those of one rank, bit for bit, wherever the logits are. Log-probabilities add the ranks' sums up: 2e-6 off.
A row that is not finite on any rank draws token 0 on all of them; its request ends.
Source: arXiv 1909.08053 section 3 (the cut), arXiv 1411.0030 (the draw); the search is a radix selection over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime import sampling
from runtime.adjust import apply_adjustments
from runtime.types import F32, GREEDY_TEMPERATURE, I32, I64, U32, U64, Array, Bools

DIGIT = 10  # bits of a place that a round of the search settles: 8 KiB a row and rank

Tell = Callable[[Array], Array]  # [r, n] of this rank -> [r, world, n] of all, in rank order


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's tokens, first <= id < first + size, of a vocabulary of `total`."""

    first: int
    size: int
    total: int

    def own(self, table: I32, by: F32) -> tuple[I32, F32]:
        """The entries [n, 2] (row or sequence, token) of own tokens, counted from `first`."""
        token = table[:, 1] - np.int32(self.first)
        mine = (token >= 0) & (token < self.size)
        return np.stack([table[mine, 0], token[mine]], axis=1), by[mine]

    def mask(self, logits: F32, row_index: I32, mask_rows: I32, masks: U32) -> None:
        """`runtime.masks.apply_masks` for own tokens."""
        at = np.searchsorted(row_index, mask_rows)
        bits = np.unpackbits(np.ascontiguousarray(masks, "<u4").view(np.uint8), axis=1, count=self.total, bitorder="little")
        logits[at] = np.where(bits[:, self.first : self.first + self.size] > 0, logits[at], np.float32(-np.inf))


def sample_share(
    tell: Tell, share: Share, logits: F32, drawing: tuple[Array, ...], *, target: I32, logp: F32, finite: Bools, top_ids: I32, top_logp: F32
) -> None:
    """The op `sample` of logits [r, share.size] f32, all else as the op takes it and equal on all ranks: `drawing`, and the outputs."""
    out_rows, seq, pos, temperature, top_p, min_p, top_k, seed, logprobs, *tables = drawing
    rows, stream = len(out_rows), seq[out_rows]
    if logits.shape != (rows, share.size):
        raise ValueError(f"sample: logits {list(logits.shape)} of {rows} rows and {share.size} tokens")
    ok = sampling.is_finite_rows(logits)
    logits = logits if ok.all() else np.where(ok[:, None], logits, np.float32(0.0))
    adjusted = _adjusted(share, logits, out_rows, stream, tables)
    best, every = adjusted.argmax(axis=1), np.arange(rows)
    raw = logits.max(axis=1)
    total = np.log(np.exp(logits - raw[:, None]).astype(np.float64).sum(axis=1)) + raw
    words = [~ok, adjusted[every, best], best + share.first, logits[every, best], total]
    heard = tell(np.stack(words, axis=1).astype(np.float64))  # float32 and ids are exact in it
    finite[:] = ~heard[:, :, 0].any(axis=1)
    winner = heard[:, :, 1].argmax(axis=1)  # of equals the lower rank: the lower id
    largest, token, value = (heard[every, winner, i] for i in (1, 2, 3))
    with np.errstate(all="ignore"):
        total = np.logaddexp.reduce(heard[:, :, 4], axis=1)
        hot = np.flatnonzero(finite & (temperature[stream] >= GREEDY_TEMPERATURE))
        if len(hot):
            s = stream[hot]
            d = (adjusted[hot] - largest[hot].astype(np.float32)[:, None]) / temperature[s].astype(np.float32)[:, None]
            kept = _kept(tell, share, d, top_p[s], min_p[s], top_k[s])
            score, drawn = _race(share, d, kept, seed[s], pos[out_rows[hot]].astype(np.int64) + 1)
            at = np.maximum(drawn - share.first, 0)
            scores = tell(np.stack([score, drawn, logits[hot, at]], axis=1).astype(np.float64))
            winner, some = scores[:, :, 0].argmax(axis=1), np.arange(len(hot))
            won = scores[some, winner, 0] > -np.inf
            token[hot[won]], value[hot[won]] = scores[some, winner, 1][won], scores[some, winner, 2][won]
    target[:] = np.where(finite, token, 0)
    wanted = np.flatnonzero(logprobs[stream] >= 0)
    logp[wanted] = np.where(finite, value - total, np.nan)[wanted]
    if len(wanted) and top_ids.shape[1]:
        top_ids[wanted], top_logp[wanted] = _alternatives(tell, share, logits[wanted], total[wanted], finite[wanted], top_ids.shape[1])


def _adjusted(share: Share, logits: F32, out_rows: I32, stream: I32, tables: list[Array]) -> F32:
    adjust_seq, adjust_seq_by, adjust_row, adjust_row_by, mask_rows, masks = tables
    if not (len(adjust_seq) or len(adjust_row) or len(mask_rows)):
        return logits
    adjusted = logits.copy()
    apply_adjustments(adjusted, stream, out_rows, *share.own(adjust_seq, adjust_seq_by), *share.own(adjust_row, adjust_row_by))
    if len(mask_rows):
        share.mask(adjusted, out_rows, mask_rows, masks)
    return adjusted


def _kept(tell: Tell, share: Share, d: F32, top_p: Array, min_p: Array, top_k: Array) -> Bools:
    """Which own tokens the filters keep and can win: [r, size]. The filters of `sampling.draw`, in its order."""
    kept = np.asarray(d >= sampling.HOPELESS)
    limited, nucleus = np.flatnonzero((top_k > 0) & (top_k < share.total)), np.flatnonzero(top_p < 1)
    rows = np.flatnonzero(min_p > 0)
    floor = sampling._log(np.maximum(min_p[rows].astype(np.float32), np.float32(1e-37)))
    cut = np.full(len(d), _place(share, np.array([np.inf], np.float32), share.total)[0], np.uint64)
    cut[rows] = _place(share, -floor, share.total)
    filtered = np.union1d(np.union1d(limited, nucleus), rows)
    if not len(filtered):
        return kept
    place = np.zeros(d.shape, np.uint64)
    place[filtered] = _place(share, -d[filtered], share.first + np.arange(share.size))
    if len(limited):
        rising = np.sort(place[limited], axis=1)
        counts = np.broadcast_to(np.arange(share.size + 1), (len(limited), share.size + 1))
        cut[limited] = np.minimum(cut[limited], _first_to_reach(tell, share, rising, counts, top_k[limited].astype(np.int64)))
    if len(nucleus):
        rising = np.sort(place[nucleus], axis=1)
        below = (rising >> np.uint64(_id_bits(share))).astype(np.uint32).view(np.float32)
        masses = np.zeros((len(nucleus), share.size + 1), np.int64)
        sampling._mass(below).cumsum(axis=1, out=masses[:, 1:])
        inside = (rising <= cut[nucleus, None]).sum(axis=1, keepdims=True)
        held = tell(np.take_along_axis(masses, inside, axis=1)).sum(axis=(1, 2))
        wanted = np.ceil(top_p[nucleus].astype(np.float64) * held).astype(np.int64)
        cut[nucleus] = np.minimum(cut[nucleus], _first_to_reach(tell, share, rising, masses, wanted))
    kept[filtered] &= place[filtered] <= cut[filtered, None]
    return kept


def _id_bits(share: Share) -> int:
    return share.total.bit_length()


def _place(share: Share, below: F32, token: Array | int) -> U64:
    """The one order as a number: bits of `below` = -d >= 0, then the id. token: of each column; share.total: behind all of them."""
    bits = (below + np.float32(0.0)).view(np.uint32).astype(np.uint64)
    return (bits << np.uint64(_id_bits(share))) | np.asarray(token, np.uint64)


def _first_to_reach(tell: Tell, share: Share, rising: U64, weight: I64, wanted: I64) -> U64:
    """The first place at which the weights of all ranks' tokens up to it reach `wanted` [r]; behind all places if they never do.

    rising: [r, size] own places; weight: [r, size + 1] the weight of the first n of them.
    """
    bits = -(-(32 + _id_bits(share)) // DIGIT) * DIGIT
    cut = np.zeros(len(rising), np.uint64)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        ends = cut[:, None] + (np.arange(1, (1 << DIGIT) + 1, dtype=np.uint64) << np.uint64(shift))
        before = np.stack([row.searchsorted(end) for row, end in zip(rising, ends, strict=True)])
        reached = tell(np.take_along_axis(weight, before, axis=1)).sum(axis=1) >= wanted[:, None]
        digit = np.where(reached.any(axis=1), reached.argmax(axis=1), (1 << DIGIT) - 1)
        cut += digit.astype(np.uint64) << np.uint64(shift)
    return cut


def _race(share: Share, d: F32, kept: Bools, seed: Array, pos: I64) -> tuple[F32, I64]:
    """The best score of each row's kept tokens and its token, of equals the lowest; -inf and share.first where none is kept."""
    score, token = np.full(len(d), -np.inf, np.float32), np.full(len(d), share.first, np.int64)
    counts = kept.sum(axis=1)
    some = np.flatnonzero(counts)
    if len(some):
        flat = np.flatnonzero(kept)
        score[some], token[some] = sampling._race(d.ravel()[flat], flat % share.size + share.first, counts[some], seed[some], pos[some])
    return score, token


def _alternatives(tell: Tell, share: Share, logits: F32, total: Array, finite: Bools, n: int) -> tuple[I32, F32]:
    """The n likeliest tokens of all ranks' logits, of equals the lower ids first, and their log-probabilities."""
    rows, most = len(logits), min(n, share.size)
    told = np.full((rows, 2, n), -np.inf)
    columns = sampling._largest(logits, most)
    told[:, 0, :most], told[:, 1, :most] = np.take_along_axis(logits, columns, axis=1), columns + share.first
    heard = tell(told.reshape(rows, -1)).reshape(rows, -1, 2, n)
    value, name = (heard[:, :, i].reshape(rows, -1) for i in (0, 1))
    order = np.lexsort((name, -value), axis=1)[:, :n]
    ids = np.where(finite[:, None], np.take_along_axis(name, order, axis=1), np.arange(n)).astype(np.int32)
    logp = np.where(finite[:, None], np.take_along_axis(value, order, axis=1) - total[:, None], np.nan)
    return ids, logp.astype(np.float32)
