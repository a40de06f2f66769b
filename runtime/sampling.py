"""Sampling: from the target's logits to tokens. This file is the definition; kernels follow it.

A token is a function of its row's logits, the request's parameters and (seed, position): the best
of score = (logit - largest logit) / temperature - log(E) over the tokens that the filters keep,
where E ~ Exp(1) is keyed by (seed, position, token). That maximum is an exact draw from the
softmax (Gumbel-max), wherever the row stands, in whatever company.

The arithmetic is IEEE float32 +, -, *, /, rounding and comparison in the order written, never a
fused multiply-add, and integers beyond that. So every CPU, and a CUDA kernel that uses __fmul_rn and
__fadd_rn, gets the same bits; the sums are of integers and do not depend on their order.

Source: Gumbel-max, arXiv 1411.0030; Philox4x32-10, Salmon et al., SC'11, doi 10.1145/2063384.2063405; top-p, arXiv 1904.09751.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.adjust import SequenceHistory, apply_adjustments, fill_adjustments
from runtime.types import F32, GREEDY_TEMPERATURE, I32, I64, Array, Bools

__all__ = [
    "SequenceHistory",
    "apply_adjustments",
    "draw",
    "fill_adjustments",
    "is_finite_rows",
    "log_softmax_at",
    "philox",
    "top_logprobs",
]

U32 = NDArray[np.uint32]

TOKEN_DRAW = 0x544F4B4E  # last counter word, "TOKN": other uses of the generator take another
MASS_BITS = 40  # the likeliest token weighs 2^40: 2^18 tokens sum below 2^63, and 2^-40 of it is noise
# -log(E) lies in [-2.82, 22.88] by the grid of E, so a token this far below the best can not win: exact, and saves random numbers.
HOPELESS = np.float32(-26.0)

# Elements in one go: NumPy takes temporaries above 128 KiB from fresh pages, which costs 10 ns an element in place of 2.
_PIECE = 32_768
_BLOCKS_AT_ONCE = 4096

_MULTIPLY = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint32)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint32)

_ONE, _TWO = np.float32(1.0), np.float32(2.0)
_LN2, _LOG2_E = np.float32(0.6931471805599453), np.float32(1.4426950408889634)
_ROOT_HALF_BITS = np.float32(0.5**0.5).view(np.int32)
_ATANH = [np.float32(1 / k) for k in (9, 7, 5, 3)]  # atanh(s) = s (1 + s^2/3 + s^4/5 + ...); 2e-9 off at |s| <= 0.172
_EXP = [np.float32(1 / k) for k in (720, 120, 24, 6, 2, 1)]  # 1.2e-7 off at |x| <= 0.347


def draw(logits: F32, *, temperature: Array, top_p: Array, min_p: Array, top_k: Array, seed: Array, pos: Array) -> I32:
    """Draws one token for each row: [r] i32.

    logits: [r, V] f32, adjusted. Per row: temperature f32 (below 1e-5: argmax), top_p f32 in (0, 1],
    min_p f32, top_k i32 (0: all), seed u64, pos i64 (of the token drawn). Ties go to the lower id.
    The filters act in this order, each on what the last one left:
      temperature   d = (logit - largest) / temperature
      min_p         keeps d >= log(min_p): at least min_p times as likely as the likeliest
      top_k         keeps the k largest d, of equals the lower ids
      top_p         keeps the fewest largest d that hold top_p of the mass, of equals the lower ids
    A row with NaN or +inf gives some token and leaves its neighbours alone; see `is_finite_rows`.
    """
    rows, vocab = logits.shape
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p), ("top_k", top_k), ("seed", seed), ("pos", pos)):
        if value.shape != (rows,):
            raise ValueError(f"draw: {name} has shape {value.shape}, logits {logits.shape} need [{rows}]")
    best = logits.argmax(axis=1)
    token: I32 = best.astype(np.int32)
    hot = np.flatnonzero(temperature >= GREEDY_TEMPERATURE)
    waiting: list[tuple[I64, F32, I64, I64]] = []
    at_once = max(1, _PIECE // max(vocab, 1))
    with np.errstate(all="ignore"):  # NaN rows and rows without a finite logit: d is NaN there and nothing is kept
        for start in range(0, len(hot), at_once):
            some = hot[start : start + at_once]
            d = logits[some]
            d -= logits[some, best[some]][:, None]
            d /= temperature[some].astype(np.float32)[:, None]
            waiting.append((some, *_keep(d, top_p[some], min_p[some], top_k[some])))
            if start + at_once >= len(hot) or sum(len(piece[1]) for piece in waiting) >= _PIECE:
                row, d, kept, counts = waiting[0] if len(waiting) == 1 else map(np.concatenate, zip(*waiting, strict=True))
                row, counts = row[counts > 0], counts[counts > 0]
                token[row] = _race(d, kept, counts, seed[row], pos[row])[1]
                waiting.clear()
    return token


def _keep(d: F32, top_p: Array, min_p: Array, top_k: Array) -> tuple[F32, I64, I64]:
    """Returns (d, id) of the tokens that the filters keep and that can win, row by row, and how many of each row.

    All filters cut one order: d falling, then id rising.
    """
    rows, vocab = d.shape
    lowest, many = np.full(rows, HOPELESS), np.full(rows, vocab)
    filtered = np.flatnonzero((top_p < 1) | (min_p > 0) | ((top_k > 0) & (top_k < vocab)))
    if len(filtered):
        part = d if len(filtered) == rows else d[filtered]
        many[filtered], last = _cut(part, top_p[filtered], min_p[filtered], top_k[filtered])
        lowest[filtered] = np.maximum(last, HOPELESS)
    flat = np.flatnonzero(d >= lowest[:, None])
    edge = np.arange(0, rows * vocab + 1, vocab)
    counts = np.diff(flat.searchsorted(edge))
    kept = d.ravel().take(flat)
    excess = np.maximum(counts - many, 0)
    if excess.any():
        flat, kept = _drop_last_equals(flat, kept, counts, lowest, excess)
        counts = counts - excess
    return kept, flat - np.repeat(edge[:-1], counts), counts


def _drop_last_equals(flat: I64, value: F32, counts: I64, edge: F32, excess: I64) -> tuple[I64, F32]:
    """Drops excess[r] of each row's counts[r] tokens: the highest ids among those whose value is edge[r]."""
    equal = np.flatnonzero(value == np.repeat(edge, counts))
    ends = equal.searchsorted(np.cumsum(counts))
    over = equal[np.repeat(ends - excess, np.diff(ends, prepend=0)) <= np.arange(len(equal))]
    return np.delete(flat, over), np.delete(value, over)


def _cut(d: F32, top_p: Array, min_p: Array, top_k: Array) -> tuple[I64, F32]:
    """Returns how many tokens each row keeps and the d of the last of them, both [r]."""
    rows, vocab = d.shape
    below = -d
    below.sort(axis=1)  # NaN last
    many = np.full(rows, vocab)
    if (min_p > 0).any():
        over = below > -_log(np.maximum(min_p.astype(np.float32), np.float32(1e-37)))[:, None]
        many = np.where((min_p > 0) & over[:, -1], over.argmax(axis=1), many)
    many = np.where(top_k > 0, np.minimum(many, top_k), many)
    every = np.arange(rows)
    if (top_p < 1).any():
        mass = _mass(below).cumsum(axis=1)
        wanted = np.ceil(top_p.astype(np.float64) * mass[every, many - 1]).astype(np.int64)
        many = np.where(top_p < 1, np.minimum((mass >= wanted[:, None]).argmax(axis=1) + 1, many), many)
    return many, -below[every, many - 1]


def _race(d: F32, token: I64, counts: I64, seed: Array, pos: Array) -> tuple[F32, I64]:
    """Returns the best score of each row's counts[r] > 0 tokens, and its token, of equals the lowest id."""
    if len(counts) == 0:
        return np.zeros(0, np.float32), counts
    start = np.cumsum(counts) - counts
    half = len(counts) // 2
    if half and len(token) > _PIECE // 2:
        cut = int(start[half])
        first = _race(d[:cut], token[:cut], counts[:half], seed[:half], pos[:half])
        second = _race(d[cut:], token[cut:], counts[half:], seed[half:], pos[half:])
        return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])
    place = np.repeat(np.arange(len(counts)), counts)
    score = d - _log(_exponential(_words(place, token, seed, pos)))
    best = np.maximum.reduceat(score, start)
    won = np.flatnonzero(score == best.take(place))
    return best, token[won[np.searchsorted(won, start)]]


def _words(place: I64, token: I64, seed: Array, pos: Array) -> U32:
    """Returns the random word of each (row, token), both rising; four tokens of a row share one Philox block."""
    block = token >> 2
    fresh = np.ones(len(token), np.bool_)
    fresh[1:] = (block[1:] != block[:-1]) | (place[1:] != place[:-1])
    first = np.flatnonzero(fresh)
    row = place.take(first)
    counter = np.empty((4, len(first)), np.uint32)
    counter[0] = block.take(first)
    counter[1:3] = _halves(pos).take(row, axis=1)
    counter[3] = TOKEN_DRAW
    words = philox(counter, _halves(seed).take(row, axis=1))
    return words.ravel().take((token & 3) * len(first) + np.cumsum(fresh) - 1)


def _halves(wide: Array) -> U32:
    """Low and high word of 64-bit integers: [2, n] u32."""
    return np.ascontiguousarray(wide, wide.dtype.newbyteorder("<")).view("<u4").reshape(-1, 2).T


def philox(counter: U32, key: U32) -> U32:
    """Philox4x32-10: the random words [4, n] u32 of counter [4, n] u32 under key [2, n] u32.

    A round sends (x0, x1, x2, x3) to (hi(M1 x2) ^ x1 ^ k0, lo(M1 x2), hi(M0 x0) ^ x3 ^ k1, lo(M0 x0))
    and adds the Weyl constants to the key. Source: Salmon et al., SC'11, section 4.2.
    """
    words = np.empty(counter.shape, np.uint32)
    for start in range(0, counter.shape[1], _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        even, odd, keys = counter[0::2, part], counter[1::2, part], key[:, part].copy()
        for _ in range(10):
            product = np.multiply(even, _MULTIPLY, dtype="<u8").view("<u4").reshape(2, -1, 2)[::-1]
            even = product[:, :, 1] ^ odd
            even ^= keys
            odd = product[:, :, 0]
            keys += _WEYL
        words[0::2, part], words[1::2, part] = even, odd
    return words


def _exponential(word: U32) -> F32:
    """E = -log(1 - v) with v = (word + 1/2) / 2^32 in (0, 1): E near 0, which wins, keeps its full precision."""
    v = word.astype(np.float32)
    v += np.float32(0.5)
    v *= np.float32(2.0**-32)
    v = np.minimum(v, np.float32(1 - 2.0**-24))
    s = _ONE - v
    lost = _ONE - s
    lost -= v  # what rounding 1 - v lost, exactly
    lost += _log(s)
    return -lost


def _log(x: F32) -> F32:
    """log of positive normal numbers within 3 ulp: x = 2^e m, m in [sqrt(1/2), sqrt(2)), log m = 2 atanh((m - 1) / (m + 1))."""
    bits = x.view(np.int32) - _ROOT_HALF_BITS
    exponent = bits >> 23
    bits &= 0x7FFFFF
    bits += _ROOT_HALF_BITS
    s = bits.view(np.float32) - _ONE
    s /= s + _TWO
    square = s * s
    series = square * _ATANH[0]
    for term in _ATANH[1:]:
        series += term
        series *= square
    series *= s
    series += s
    series *= _TWO
    result: F32 = exponent.astype(np.float32)
    result *= _LN2
    result += series
    return result


def _mass(below: F32) -> I64:
    """floor(2^40 exp(-below)) within 1e-6 of it; below: >= 0. 2^-t = 2^-n 2^(n - t) with n = round(t)."""
    t = below * _LOG2_E
    np.minimum(t, np.float32(100.0), out=t)
    n = np.rint(t)
    x = n - t
    x *= _LN2
    weight = x * _EXP[0]
    for term in _EXP[1:]:
        weight += term
        weight *= x
    weight += _ONE
    n -= np.float32(MASS_BITS)
    exponent = n.astype(np.int32)
    exponent <<= 23
    weight.view(np.int32)[...] -= exponent
    mass: I64 = weight.astype(np.int64)
    return mass


def is_finite_rows(logits: F32) -> Bools:
    """Returns which rows hold neither NaN nor Inf: [r]. For raw logits; adjusted ones may hold -inf."""
    return np.asarray(np.isfinite(logits).all(axis=1))


def log_softmax_at(logits: F32, token: Array) -> F32:
    """Returns the log-probability of one token a row in the raw distribution: [r] f32. logits: [r, V] f32, token: [r] int."""
    chosen = np.take_along_axis(logits, np.asarray(token, np.int64)[:, None], axis=1)
    logp = np.empty(len(logits), np.float32)
    at_once = max(1, _PIECE // max(logits.shape[1], 1))
    for start in range(0, len(logits), at_once):
        some = slice(start, start + at_once)
        logp[some] = _log_softmax(logits[some], chosen[some])[:, 0]
    return logp


def top_logprobs(logits: F32, n: int) -> tuple[I32, F32]:
    """Returns the n likeliest tokens of each row and their raw log-probabilities: ids [r, n] i32, logp [r, n] f32.

    Falling; of equals the lower id comes first. n is cut at V. A NaN row gives some ids and NaN.
    """
    rows, vocab = logits.shape
    n = max(min(n, vocab), 0)
    ids, logp = np.empty((rows, n), np.int32), np.empty((rows, n), np.float32)
    at_once = max(1, _PIECE // max(vocab, 1))
    for start in range(0, rows if n else 0, at_once):
        some = slice(start, start + at_once)
        columns = _largest(logits[some], n)
        ids[some] = columns
        logp[some] = _log_softmax(logits[some], np.take_along_axis(logits[some], columns, axis=1))
    return ids, logp


def _largest(logits: F32, n: int) -> I64:
    """Columns of the n largest logits of each row, falling, of equals the lower first: [r, n]. NaN comes last."""
    rows, vocab = logits.shape
    below = -logits
    below[np.isnan(below)] = np.inf
    edge = np.partition(below, n - 1, axis=1)[:, n - 1]
    flat = np.flatnonzero(below <= edge[:, None])
    first = np.arange(0, rows * vocab + 1, vocab)
    counts = np.diff(flat.searchsorted(first))
    value = below.ravel().take(flat)
    if len(flat) > rows * n:
        flat, value = _drop_last_equals(flat, value, counts, edge, counts - n)
    order = np.argsort(value.reshape(rows, n), axis=1, kind="stable")
    return np.take_along_axis(flat.reshape(rows, n) - first[:-1, None], order, axis=1)


def _log_softmax(logits: F32, chosen: F32) -> F32:
    """chosen - log sum exp(logits): [r, n]. Sums are float64, each row's in one order whatever its company."""
    with np.errstate(all="ignore"):  # NaN and +inf rows give NaN
        largest = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - largest).astype(np.float64).sum(axis=1, keepdims=True)
        result: F32 = ((chosen - largest) - np.log(total)).astype(np.float32)
    return result
