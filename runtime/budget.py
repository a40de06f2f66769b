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
from runtime.price import Price, Prices
from runtime.tree import Forest
from runtime.types import I64, Array, Bools

F64 = NDArray[np.float64]

DEPTHS = 16  # deeper nodes share the last row
BINS = 12  # of probability: 4 sqrt(-log p), so 0.94, 0.78, 0.57, 0.37, 0.21, 0.11 … 0.0005 are edges
STRENGTH = 8.0  # expected acceptances that the prior is worth
EASE_NODES, EASE = 8, 0.3
FIRST_CELL = np.maximum(np.arange(DEPTHS + 1) - 1, 0) * 2 * BINS  # of a depth
CERTAIN = 1.0 - 2.0**-40  # at most: a child is then below its parent, however their products were rounded
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
    price: Price,
    *,
    base: float,
    drafted: int,
    weights: Array | None = None,
    most: int | None = None,
    prices: Prices | None = None,
) -> Allocation:
    """Chooses the nodes of one step over all streams.

    value: [B, N] chance that node j + 1 of stream b is accepted, never above its parent's, in [0, 1]; 0 where there is no such
    node, or none within the stream's caps on nodes and depth. base: tokens (times weight) that come without any node. drafted:
    streams whose draft has been paid. weights: [B] what a token of a stream is worth (default 1), above 0. most: most nodes in
    all; the room of the price bounds them too. prices: `price.table` of min(B N, most) and drafted, if at hand. Ties in rate go
    to fewer nodes, ties in value to the lower stream, then the lower node.
    Scans every n that can win: `Price.counts`.
    """
    worth = value if weights is None else value * np.asarray(weights, np.float64)[:, None]
    rising = np.sort(worth, axis=None)
    positive = len(rising) - int(rising.searchsorted(0.0, side="right"))
    if prices is None or prices.counts[-1] > positive:
        prices = price.table(positive if most is None else min(positive, most), drafted)
    gain = np.zeros(int(prices.counts[-1]) + 1)
    rising[::-1][: len(gain) - 1].cumsum(out=gain[1:])
    gain += base
    best = int((gain.take(prices.counts) / prices.seconds).argmax())
    total = int(prices.counts[best])
    kept = _first(worth, float(rising[-total]), total) if total else np.zeros(worth.shape, np.bool_)
    expected = float((value * kept).sum())
    return Allocation(kept, np.add.reduce(kept, axis=1, dtype=np.int64), total, expected, float(prices.seconds[best]))


def _first(worth: F64, limit: float, total: int) -> Bools:
    """The `total` nodes of greatest worth, the last of which is `limit`, [B, N]; equal ones by stream, then node, which keeps
    parents before children."""
    kept: Bools = worth >= limit
    over = int(np.count_nonzero(kept)) - total
    if over:
        tied = (worth.ravel() == limit).nonzero()[0]
        kept.ravel()[tied[len(tied) - over :]] = False
    return kept


def ease_weights(value: F64) -> F64:
    """[B] weights of mean 1 that count a node less where its stream goes fast anyway: (1 + value of its first 8 nodes) ** -0.3.

    A token won in an easy stretch of text saves little time: the next step would have brought it among several. In
    tools/results/sweetspot_sim.jsonl this is worth 0.2 % on average (-0.6 to +0.9 %), most at 64 streams past saturation. On
    the other half of the texts 0.3 to 0.6 differed by 0.5 %, and 1.0 lost 2.5 % at 16 streams.
    """
    return stream_weights(value, 1.0)


def stream_weights(value: F64, asked: Array | float) -> F64:
    """[B] weights of mean 1: ease times what the requests ask for, [B] above 0. One stream alone weighs 1 whatever it asks."""
    if len(value) < 2:
        return np.ones(len(value))
    weights: F64 = (1.0 + value[:, :EASE_NODES].sum(axis=1)) ** -EASE * asked
    weights /= weights.sum() / len(weights)
    return weights


def caps_mask(forest: Forest, nodes: Array, depth: Array) -> Bools:
    """Nodes of a forest that exist and are within [B] caps on nodes and depth: [B, N], closed under parents."""
    columns = np.arange(1, forest.token.shape[1])
    limit = np.minimum(forest.size, nodes)[:, None]
    mask: Bools = (columns <= limit) & (forest.depth[:, 1:] <= np.asarray(depth)[:, None])
    return mask


def prune(forest: Forest, kept: Bools) -> Grove:
    """The kept nodes of each stream under its root, renumbered in the forest's order; kept [B, N] is closed under parents."""
    streams, width = forest.token.shape
    with_root = np.ones((streams, width), np.bool_)
    with_root[:, 1:] = kept
    sizes, chosen = np.add.reduce(with_root, axis=1, dtype=np.int64), with_root.ravel().nonzero()[0]
    roots = sizes.cumsum() - sizes
    number = with_root.cumsum(dtype=np.int64)  # of all streams together, from 1
    number -= (roots + 1).repeat(width)
    token, above, depth = forest.token.take(chosen), forest.parent.take(chosen), forest.depth.take(chosen)
    above[roots] = 0
    parent = number.take(above + (np.arange(streams) * width).repeat(sizes)).astype(np.int16)
    parent[roots] = -1
    return Grove(token, parent, depth, sizes.tolist())


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
        self._flat: F64 | None = None  # of ratio, until the next lesson

    @property
    def ratio(self) -> F64:
        """[DEPTHS, 2, BINS] accepted ÷ promised, drawn towards 1 where little was seen."""
        found: F64 = (STRENGTH + self.accepted) / (STRENGTH + self.promised)
        return found

    def values(self, forest: Forest, cells: Cells | None = None) -> F64:
        """[B, N] chance that each node (root left out) is accepted; below its parent's. 0 past a stream's size."""
        cells = cells or find_cells(forest)
        if self._flat is None:
            self._flat = self.ratio.ravel()
        chance = self._flat.take(cells.cell)
        chance *= cells.own
        np.minimum(chance, CERTAIN, out=chance)
        chance[:, 0] = 1.0
        leap, deepest = cells.above, int(forest.depth.max(initial=0))
        for _ in range((deepest - 1).bit_length() if deepest else 0):  # twice as far up each time; above the root there is the root, 1
            chance *= chance.take(leap)
            leap = leap.take(leap)
        return chance[:, 1:]

    def observe(self, forest: Forest, kept: Bools, accepted: Bools, cells: Cells | None = None) -> None:
        """Counts verified nodes whose parent was accepted. kept, accepted: [B, N], accepted within kept."""
        if not kept.size:
            return
        cells = cells or find_cells(forest)
        stream, node = np.nonzero(kept)
        up = np.maximum(forest.parent[stream, node + 1], 0)
        tried = (up == 0) | accepted[stream, up - 1]
        stream, node = stream[tried], node[tried]
        cell = cells.cell[stream, node + 1]
        fade = (1.0 - 1.0 / MEMORY) ** len(kept)
        for table, weight in ((self.promised, cells.own[stream, node + 1]), (self.accepted, accepted[stream, node])):
            table *= fade
            table += np.bincount(cell, weight, table.size).reshape(table.shape)
        self._flat = None


@dataclass(frozen=True, slots=True)
class Cells:
    """Where calibration counts the nodes of a forest, and what is above them; a root's cell and chance mean nothing."""

    cell: I64  # [B, N + 1] flat
    own: F64  # [B, N + 1] probability that the drafter gives the node's token; 0 past a stream's size
    above: I64  # [B, N + 1] the parent's place among all B (N + 1), a root's own


def find_cells(forest: Forest) -> Cells:
    """The cells of a forest's nodes; a step needs them twice, before and after."""
    streams, width = forest.key.shape
    above = np.maximum(forest.parent, 0) + np.arange(0, streams * width, width)[:, None]
    key, missing = forest.key, None
    if int(forest.size.min(initial=width)) < width - 1:
        missing = np.arange(width) > forest.size[:, None]
        key = np.where(missing, 0.0, key)
    cost = key.take(above) - key
    if missing is not None:
        cost[missing] = np.inf
    level = np.sqrt(cost)
    level *= 4.0
    cell = np.minimum(level, BINS - 1, out=level).astype(np.int64)
    cell += FIRST_CELL.take(forest.depth, mode="clip")
    cell += BINS * ~_on_spine(forest).take(above)
    return Cells(cell, np.exp(np.negative(cost, out=cost)), above)


def _on_spine(forest: Forest) -> Bools:
    """[B, N + 1] the root and the top-1 chain below it: the first node of each depth, as keys fall and ties go to lower ranks."""
    spine = np.ones(forest.depth.shape, np.bool_)
    spine[:, 1:] = forest.depth[:, 1:] > np.maximum.accumulate(forest.depth, axis=1)[:, :-1]
    return spine
