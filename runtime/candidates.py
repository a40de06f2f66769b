"""Which prefixes can be in the best draft tree of n nodes, whatever the drafter says: few enough to look at all of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from runtime.types import I16, I64

# Above this many candidates a stream the heap wins. At D 7, K 16: 285 hold every tree of 16 nodes (32 streams: 0.11 ms,
# heap 0.5), 5,259 those of 64 (64 streams: 1.1 ms, heap 3.4), 19,050 those of 128 (64 streams: 4.2 ms, heap 6.7).
MAX_CANDIDATES = 20_000
SORTED = 64  # up to so many of a stream are sorted whole: 10 us for 8 streams of 38, 23 where the best are parted from the others first
# From this many on a bound parts them: the last of 1,197 to be among 31 is found in 75 us for 8 streams, among the likeliest 186 in 15, and
# 46 are then left to sort, not 31.
PARTED = 512
LIKELY = 6  # for each node of the budget


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every prefix that some log-probabilities put into a tree of `budget` nodes, in the order of rank tuples."""

    places: I64 | None  # [L, C] of its ranks' costs in the table that `runtime.tree` looks them up in, if they are few
    levels: tuple[tuple[I64, I64], ...]  # for each depth: parent's place in the level above, rank
    order: I64  # [C] their places in the levels, one after the other
    likely: I64 | None  # of these some that are often good: the n-th best of them bounds the n-th best of all; None: too few to pick
    parent: I64  # [C] candidate above, C for the root
    depth: I16  # [C] from 1
    choice: I64  # [C] its last token, among the choices of all depths


@functools.lru_cache(maxsize=256)
def candidates(budget: int, depth: int, choices: int) -> Candidates | None:
    """Lists the prefixes that can be among the best `budget`; None if they are too many to be worth it.

    Of a prefix with ranks r1..rd, every (s1..se) with e <= d and s <= r comes before it whatever the
    log-probabilities: sum over e of prod (r_i + 1) prefixes, itself included. So that sum is <= budget.
    """
    widest = min(choices, budget)
    ranks = np.arange(widest)
    product, total, paths = ranks + 1, ranks + 1, ranks[:, None]
    first = 0
    parents: list[I64] = [np.zeros(widest, np.int64)]
    levels: list[I64] = [paths]
    totals = [total]
    while len(levels) < depth:
        counts = np.minimum((budget - total) // product, choices)
        above = np.repeat(np.arange(len(paths)), counts)
        if len(above) == 0:
            break
        if first + len(paths) + len(above) > MAX_CANDIDATES:
            return None
        rank = np.arange(len(above)) - np.repeat(np.cumsum(counts) - counts, counts)
        product = product[above] * (rank + 1)
        total = total[above] + product
        totals.append(total)
        parents.append(above)
        first += len(paths)
        paths = np.concatenate([paths[above], rank[:, None]], axis=1)
        levels.append(paths)
    deep = len(levels)
    padded = [np.pad(paths, ((0, 0), (0, deep - paths.shape[1])), constant_values=-1) for paths in levels]
    tuples = np.concatenate(padded)  # -1 pads: a prefix sorts before its extensions
    order = np.lexsort(tuples.T[::-1])
    tuples, count = tuples[order], len(order)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    starts = np.cumsum([0, *map(len, levels)])
    uppers = [np.full(widest, count), *(place[first + up] for first, up in zip(starts, parents[1:], strict=False))]
    depths = np.count_nonzero(tuples >= 0, axis=1)
    places = np.arange(deep)[:, None] * (choices + 1) + np.where(tuples >= 0, tuples, choices).T if count <= SORTED else None
    choice = (depths - 1) * choices + tuples[np.arange(count), depths - 1]
    each = tuple((up, paths[:, -1].copy()) for up, paths in zip(parents, levels, strict=True))
    likely = np.sort(np.concatenate(totals).argsort(kind="stable")[: LIKELY * budget]) if count >= PARTED else None
    return Candidates(places, each, order, likely, np.concatenate(uppers)[order], depths.astype(np.int16), choice)
