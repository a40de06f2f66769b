"""One node budget for all streams: how many draft nodes a step verifies, and whose.

    n* = argmax over n >= 0 of (base + sum of the n largest node values) ÷ (overhead + T_d(S) + T(rows + n))

with prompt rows priced on the same curve (`runtime.price`).

Every node of every stream competes on its value alone: the chance that it is accepted, times its stream's weight. A child is
never worth more than its parent, so the n best nodes of all streams are closed under parents by themselves (DDTree,
arXiv 2604.12989, propositions 1 and 2, hold for the streams side by side). The whole curve is scanned: on a mixture of
experts T is concave first, and the first n at which the rate falls may be a small optimum before a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.grove import Grove
from runtime.price import Price
from runtime.tree import Forest
from runtime.types import I64, Array, Bools

F64 = NDArray[np.float64]

DEPTHS = 16  # deeper nodes share the last row
BINS = 12  # of probability: 4 sqrt(-log p), so 0.94, 0.78, 0.57, 0.37, 0.21, 0.11 … 0.0005 are edges
STRENGTH = 8.0  # expected acceptances that the prior is worth
EASE_NODES, EASE = 8, 0.3
MEMORY = 20_000.0  # trees over which a cell forgets: a day of one user, minutes of a busy server


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a step verifies beside its roots, and what that should bring."""

    kept: Bools  # [B, N] node j + 1 of stream b is verified; closed under parents
    nodes: I64  # [B] nodes of each stream, roots not counted
    total: int  # their sum, n*
    expected: float  # of them accepted, on average: the sum of their values, weights left out
    seconds: float  # the price of n*: overhead + draft + T, without what prompt rows cost by themselves


def allocate(
    value: F64,
    usable: Bools,
    price: Price,
    *,
    base: float,
    drafted: int,
    weights: Array | None = None,
    most: int | None = None,
) -> Allocation:
    """Chooses the nodes of one step over all streams.

    value: [B, N] chance that node j + 1 of stream b is accepted, never above its parent's, in [0, 1]. usable: [B, N] nodes
    that exist and are within their stream's cap on nodes and depth, closed under parents. base: tokens (times weight)
    that come without any node. drafted: streams whose draft has been paid. weights: [B] what a token of a stream is worth
    (default 1), above 0. most: most nodes in all; the room of the price bounds them too. Ties in rate go to fewer nodes, ties
    in value to the lower stream, then the lower node.
    Scans every n that can win: `Price.counts`.
    """
    worth = value if weights is None else value * np.asarray(weights, np.float64)[:, None]
    worth = np.where(usable, worth, 0.0)
    flat = worth.ravel()
    falling = np.sort(flat)[::-1]
    positive = len(falling) - int(np.searchsorted(falling[::-1], 0.0, side="right"))
    counts = price.counts(positive if most is None else min(positive, most))
    gain = np.concatenate([[0.0], np.cumsum(falling[: int(counts[-1])])])
    seconds = price.seconds(counts, drafted)
    best = int(np.argmax((base + gain[counts]) / seconds))
    total = int(counts[best])
    kept = _first(worth, falling, total)
    return Allocation(kept, np.count_nonzero(kept, axis=1), total, float(value[kept].sum()), float(seconds[best]))


def _first(worth: F64, falling: F64, total: int) -> Bools:
    """The `total` nodes of greatest worth, [B, N]; equal ones by stream, then node, which keeps parents before children."""
    if total == 0:
        return np.zeros(worth.shape, np.bool_)
    limit = falling[total - 1]
    kept: Bools = worth > limit
    tied = np.flatnonzero(worth.ravel() == limit)
    kept.ravel()[tied[: total - int(np.count_nonzero(kept))]] = True
    return kept


def ease_weights(value: F64) -> F64:
    """[B] weights of mean 1 that count a node less where its stream goes fast anyway: (1 + value of its first 8 nodes) ** -0.3.

    A token won in an easy stretch of text saves little time: the next step would have brought it among several. In
    tools/results/sweetspot_sim.jsonl this is worth 0.2 % on average (-0.6 to +0.9 %), most at 64 streams past saturation. On
    the other half of the texts 0.3 to 0.6 differed by 0.5 %, and 1.0 lost 2.5 % at 16 streams.
    """
    ease = (1.0 + value[:, :EASE_NODES].sum(axis=1)) ** -EASE
    weights: F64 = ease / ease.mean() if len(ease) else ease
    return weights


def stream_weights(value: F64, asked: Array) -> F64:
    """[B] weights of mean 1: ease times what the requests ask for, [B] above 0. One stream alone weighs 1 whatever it asks."""
    weights: F64 = ease_weights(value) * np.asarray(asked, np.float64)
    return weights / weights.mean() if len(weights) else weights


def caps_mask(forest: Forest, nodes: Array, depth: Array) -> Bools:
    """Nodes of a forest that exist and are within [B] caps on nodes and depth: [B, N], closed under parents."""
    columns = np.arange(1, forest.token.shape[1])
    limit = np.minimum(forest.size, nodes)[:, None]
    mask: Bools = (columns <= limit) & (forest.depth[:, 1:] <= np.asarray(depth)[:, None])
    return mask


def prune(forest: Forest, kept: Bools) -> Grove:
    """The kept nodes of each stream under its root, renumbered in the forest's order; kept [B, N] is closed under parents."""
    with_root = np.concatenate([np.ones((len(kept), 1), np.bool_), kept], axis=1)
    number = (np.cumsum(with_root, axis=1) - 1).astype(np.int16)
    stream, node = np.nonzero(with_root)  # in order of streams, so that a stream's nodes are a slice
    token, above, depth = forest.token[stream, node], forest.parent[stream, node], forest.depth[stream, node]
    parent = np.where(above < 0, above, number[stream, np.maximum(above, 0)])
    return Grove(token, parent, depth, np.count_nonzero(with_root, axis=1).tolist())


class Calibration:
    """How often nodes are accepted, against what the drafter's probabilities promise.

    A cell is (depth, parent on or off the spine, bin of the token's own probability). The chance that a node is accepted
    given that its parent was is exp(log-prob) × (STRENGTH + accepted) ÷ (STRENGTH + promised) of its cell: the drafter's word
    until there is evidence. The spine is the top-1 chain that a block drafter's marginals are conditioned on in
    training; below a sibling of it they are marginals of another text and over-state by 3 × or more (measured by others on
    Qwen3: 22 % right instead of 65–84 %). Counts decay by 1 − 1/MEMORY a tree, so a change of traffic is followed slowly.
    """

    def __init__(self) -> None:
        self.promised: F64 = np.zeros((DEPTHS, 2, BINS))
        self.accepted: F64 = np.zeros((DEPTHS, 2, BINS))

    @property
    def ratio(self) -> F64:
        """[DEPTHS, 2, BINS] accepted ÷ promised, drawn towards 1 where little was seen."""
        found: F64 = (STRENGTH + self.accepted) / (STRENGTH + self.promised)
        return found

    def values(self, forest: Forest, cells: Cells | None = None) -> F64:
        """[B, N] chance that each node (root left out) is accepted; never above its parent's. 0 past a stream's size."""
        cells = cells or find_cells(forest)
        chance = np.ones(forest.key.shape)
        chance[:, 1:] = np.minimum(cells.own * self.ratio.ravel()[cells.cell], 1.0)
        flat, width = chance.reshape(-1), forest.key.shape[1]
        above = (np.arange(len(forest.size))[:, None] * width + forest.parent).ravel()
        for depth in range(1, int(forest.depth.max(initial=0)) + 1):  # level by level: a product with at most 1 never rises
            nodes = np.flatnonzero(forest.depth == depth)
            flat[nodes] *= flat[above[nodes]]
        return np.where(np.arange(1, width) <= forest.size[:, None], chance[:, 1:], 0.0)

    def observe(self, forest: Forest, kept: Bools, accepted: Bools, cells: Cells | None = None) -> None:
        """Counts verified nodes whose parent was accepted. kept, accepted: [B, N], accepted within kept."""
        if not kept.size:
            return
        cells = cells or find_cells(forest)
        stream, node = np.nonzero(kept)
        up = np.maximum(forest.parent[stream, node + 1], 0)
        tried = (up == 0) | accepted[stream, up - 1]
        stream, node = stream[tried], node[tried]
        cell = cells.cell[stream, node]
        fade = (1.0 - 1.0 / MEMORY) ** len(kept)
        for table, weight in ((self.promised, cells.own[stream, node]), (self.accepted, accepted[stream, node])):
            table *= fade
            table += np.bincount(cell, weight, table.size).reshape(table.shape)


@dataclass(frozen=True, slots=True)
class Cells:
    """Where calibration counts the nodes of a forest, roots left out."""

    cell: I64  # [B, N] flat
    own: F64  # [B, N] probability that the drafter gives the node's token


def find_cells(forest: Forest) -> Cells:
    """The cells of a forest's nodes; a step needs them twice, before and after."""
    streams, width = forest.key.shape
    up = np.maximum(forest.parent[:, 1:], 0) + (np.arange(streams) * width)[:, None]
    exists = np.arange(1, width) <= forest.size[:, None]
    cost = np.where(exists, np.maximum(forest.key.take(up) - forest.key[:, 1:], 0.0), np.inf)
    level = np.minimum(np.sqrt(cost) * 4.0, BINS - 1).astype(np.int64)
    depth = np.where(exists, np.minimum(np.maximum(forest.depth[:, 1:], 1), DEPTHS) - 1, 0)
    off = ~_on_spine(forest).take(up)
    return Cells((depth * 2 + off) * BINS + level, np.exp(-cost))


def _on_spine(forest: Forest) -> Bools:
    """[B, N + 1] the root and the top-1 chain below it: the first node of each depth, as keys fall and ties go to lower ranks."""
    spine = np.ones(forest.depth.shape, np.bool_)
    spine[:, 1:] = forest.depth[:, 1:] > np.maximum.accumulate(forest.depth, axis=1)[:, :-1]
    return spine
