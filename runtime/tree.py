"""DDTree: the draft tree of a stream, grown best-first from the drafter's marginals.

The drafter gives, for each depth, log-probabilities that do not depend on the tokens chosen above.
A prefix's key is the sum of its log-probabilities, and the best tree of n nodes is the n prefixes
with the largest keys: it is closed under parents by itself, since a child is never likelier than
its parent. Order is exact: key falling, then rank tuple rising (a rank is a token's place among
the K of its depth). Keys are float64, parent key + log-probability, so equal sums tie everywhere.

Node ids follow that order, hence the first n + 1 nodes of a larger tree are the tree of n nodes.
Source: arXiv 2604.12989 (DDTree), propositions 1 to 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.candidates import Candidates, candidates
from runtime.grove import Grove
from runtime.types import I16, I32, I64, Array, Bools, DraftLogits, DraftTree

F64 = NDArray[np.float64]
Node = tuple[int, int, int, float]  # token, parent, depth, key

# From this many of all streams together, only those within a bound are looked at: 80 of 5,259 for each of 64 streams of 64 nodes, which
# then grow in 0.9 ms, not 2.2.
MANY_CANDIDATES = 30_000
MAX_NODES = 2**15 - 2  # without the root: DraftTree.parent is i16


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of B streams side by side, each as large as the budget allows, root first.

    Columns at or past size[b] + 1 mean nothing. key is the sum of log-probabilities (root 0), so
    exp(key) is the surrogate probability that the node is accepted, and it never rises along a row:
    whoever spends one budget over all streams reads it here and cuts.
    """

    token: I32  # [B, N + 1]
    parent: I16  # [B, N + 1]
    depth: I16  # [B, N + 1]
    key: F64  # [B, N + 1]
    size: I64  # [B] nodes without the root

    def cut(self, budget: Array) -> Grove:
        """Returns each stream's first min(budget[b], size[b]) nodes under its root; budget: [B] int."""
        lengths = np.minimum(budget, self.size) + 1
        sizes = lengths.tolist()
        if min(sizes, default=0) == self.token.shape[1]:
            return Grove(self.token.ravel(), self.parent.ravel(), self.depth.ravel(), sizes)
        kept = np.arange(self.token.shape[1]) < lengths[:, None]
        return Grove(self.token[kept], self.parent[kept], self.depth[kept], sizes)


def grow(logits: DraftLogits, root: I32, budget: int | Sequence[int], max_depth: int | Sequence[int] | None = None) -> Grove:
    """Grows the best tree of at most `budget` nodes for every stream.

    logits: B streams, D depths, K choices; root: [B] i32 bonus tokens. budget counts nodes without
    the root, one for all streams or one each, likewise max_depth; 0 gives the root alone. A tree holds fewer nodes when
    K and D do not offer as many, or when the rest has probability 0 (log-probability -inf or NaN).
    Raises ValueError on shapes that disagree or a negative budget.
    Cost: O(B n log n) over the candidates of `runtime.candidates`. Source: arXiv 2604.12989, algorithm 1.
    """
    budgets = _budgets(budget, len(root))
    return grow_forest(logits, root, int(budgets.max(initial=0)), max_depth).cut(budgets)


def grow_forest(logits: DraftLogits, root: I32, budget: int, max_depth: int | Sequence[int] | None = None) -> Forest:
    """Grows like `grow` with one budget for all streams, and keeps the keys for a later cut."""
    ids, logp = logits.ids, logits.logp
    if ids.shape != logp.shape or ids.ndim != 3 or len(ids) != len(root):
        raise ValueError(f"draft logits: ids {ids.shape}, logp {logp.shape}, root {root.shape} must be [B, D, K], [B, D, K], [B]")
    streams, depth, choices = ids.shape
    limit = np.array(depth if max_depth is None else max_depth)
    depth = min(depth, int(limit.max(initial=0)))
    if min(streams, depth, choices, budget) <= 0:
        return _roots(root)
    if budget > MAX_NODES:
        raise ValueError(f"budget: {budget} nodes; node ids are 16 bits, at most {MAX_NODES}")
    # A cost is a negated key: infinities and NaN then sort last. A log-softmax may round to just above 0. What is
    # not sorted by K counts as its likelier neighbour, and nothing grows behind a NaN: any input gives a sound tree.
    # Ranks and depths past the budget are in no tree of its size.
    depth, choices = min(depth, budget), min(choices, budget)
    cost = np.negative(logp[:, :depth, :choices], dtype=np.float64)
    np.maximum.accumulate(np.maximum(cost, 0.0, out=cost), axis=2, out=cost)
    if limit.ndim:
        cost[np.arange(depth) >= limit[:, None]] = np.inf
    table = candidates(budget, depth, choices)
    if table is None:
        return _stack(root, [_grow_heap(ids[b], cost[b], budget) for b in range(streams)])
    forest = None
    if streams * len(table.order) > MANY_CANDIDATES and (choices + 1) ** depth < 2**62:
        forest = _grow_bounded(ids, cost, root, budget, streams * len(table.order) // 4)
    return forest or _grow_table(ids, cost, root, budget, table)


def chain(logits: DraftLogits, root: I32, depth: int | Sequence[int]) -> Grove:
    """Returns each stream's likeliest token at every depth: a tree without branches.

    depth: nodes without the root, one for all streams or one each, cut at D and before the first
    log-probability of -inf or NaN.
    """
    lengths = np.minimum(_budgets(depth, len(root)), logits.ids.shape[1])
    possible = np.logical_and.accumulate(logits.logp[:, :, 0] > -np.inf, axis=1).sum(axis=1)
    lengths = np.minimum(lengths, possible) + 1
    depth_of = np.arange(lengths.max(initial=1), dtype=np.int16)
    kept = depth_of < lengths[:, None]
    token = np.concatenate([root[:, None], logits.ids[:, :, 0]], axis=1).astype(np.int32)
    depths = np.broadcast_to(depth_of, kept.shape)[kept]
    return Grove(token[:, : kept.shape[1]][kept], depths - np.int16(1), depths, lengths.tolist())


def random_tree(rng: np.random.Generator, root: int, vocab_size: int, budget: int, max_depth: int) -> DraftTree:
    """Draws a tree of any topology with uniform tokens, for tests of losslessness.

    Siblings have distinct tokens, parent[t] < t, depth <= max_depth; fewer than `budget` nodes only
    where vocab_size and max_depth leave no room.
    """
    token, parent, depth = [root], [-1], [0]
    children: list[set[int]] = [set()]
    for _ in range(budget):
        open_nodes = [t for t in range(len(token)) if depth[t] < max_depth and len(children[t]) < vocab_size]
        if not open_nodes:
            break
        above = int(rng.choice(open_nodes))
        free = int(rng.integers(vocab_size - len(children[above])))  # the free-th token that no sibling has
        for taken in sorted(children[above]):
            free += taken <= free
        children[above].add(free)
        children.append(set())
        token.append(free)
        parent.append(above)
        depth.append(depth[above] + 1)
    return DraftTree(np.array(token, np.int32), np.array(parent, np.int16), np.array(depth, np.int16))


def check_tree(tree: DraftTree) -> None:
    """Raises ValueError, naming the node, unless the tree is well formed.

    Equal lengths, one root at node 0, parent[t] < t (so no cycle), depth one below the parent's,
    and no two children of a node with one token (which of them the target accepts would be luck).
    """
    token, parent, depth = tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist()
    if not len(token) == len(parent) == len(depth) or not token:
        raise ValueError(f"draft tree: {len(token)} tokens, {len(parent)} parents, {len(depth)} depths; all must be equal and at least 1")
    if (parent[0], depth[0]) != (-1, 0):
        raise ValueError(f"draft tree: node 0 has parent {parent[0]} and depth {depth[0]}; the root has -1 and 0")
    seen: dict[tuple[int, int], int] = {}
    for t in range(1, len(token)):
        if not 0 <= parent[t] < t:
            raise ValueError(f"draft tree: node {t} has parent {parent[t]}, not in [0, {t})")
        if depth[t] != depth[parent[t]] + 1:
            raise ValueError(f"draft tree: node {t} has depth {depth[t]} under a parent of depth {depth[parent[t]]}")
        twin = seen.setdefault((parent[t], token[t]), t)
        if twin != t:
            raise ValueError(f"draft tree: nodes {twin} and {t} are both token {token[t]} under node {parent[t]}")


def _grow_table(ids: I32, cost: F64, root: I32, budget: int, table: Candidates) -> Forest:
    """Scores all candidates of all streams at once and sorts the cheapest; equal ones stand in the order of rank tuples already."""
    total = _score(cost, table)
    streams, count = total.shape
    most = min(budget, count)
    rows = np.arange(0, streams * count, count)[:, None]
    if table.places is not None:
        picked = total.argsort(axis=1, kind="stable")[:, :most]
        return _plant(ids, cost, root, table, picked, total.take(picked + rows))
    limit = _nth(total if table.likely is None else total.take(table.likely, axis=1), most)
    kept = (total <= limit[:, None]).take(table.order, axis=1)  # finite costs only; beyond `most` where ties or a bound let them in
    columns, padded = _rows_of(kept, kept.sum(axis=1))
    costs = total.take(table.order.take(columns) + rows)
    costs[padded] = np.inf
    ranking = costs.argsort(axis=1, kind="stable")[:, :most] + np.arange(streams)[:, None] * costs.shape[1]
    return _plant(ids, cost, root, table, columns.take(ranking), costs.take(ranking))


def _plant(ids: I32, cost: F64, root: I32, table: Candidates, picked: I64, found: F64) -> Forest:
    """The forest of the candidates `picked` [B, n], which cost `found`, rising."""
    (streams, depth, choices), most, wide = cost.shape, picked.shape[1], len(table.order) + 1
    rows = np.arange(streams)[:, None]
    node_of, at = np.zeros(streams * wide, np.int16), rows * wide
    node_of[(picked + at)[:, ::-1]] = np.arange(most, 0, -1, dtype=np.int16)  # padding repeats candidate 0; its true place comes last
    forest = _roots(root, most)
    forest.parent[:, 1:] = node_of.take(table.parent.take(picked) + at)
    forest.depth[:, 1:] = table.depth.take(picked)
    tokens = ids[:, :depth, :choices].reshape(-1)
    forest.token[:, 1:] = tokens.take(table.choice.take(picked) + rows * (depth * choices))
    np.negative(found, out=forest.key[:, 1:])
    forest.size[:] = (found < np.inf).sum(axis=1)
    return forest


def _score(cost: F64, table: Candidates) -> F64:
    """The cost of every candidate of every stream, summed from the root on: [B, C], in the order of `places` or of the levels."""
    streams, depth, choices = cost.shape
    if table.places is not None:  # in 3 calls, where numbers do not take the time
        costs = np.zeros((depth, choices + 1, streams))  # the last choice is none at all
        costs[:, :choices] = cost.transpose(1, 2, 0)
        return np.ascontiguousarray(costs.reshape(-1, streams).take(table.places, axis=0).sum(axis=0).T)
    total, above, at = np.empty((streams, len(table.order))), np.zeros((streams, 1)), 0
    for d, (parent, rank) in enumerate(table.levels):
        each = total[:, at : at + len(rank)]
        above = np.add(above.take(parent, axis=1), cost[:, d].take(rank, axis=1), out=each)
        at += len(rank)
    return total


def _nth(total: F64, n: int) -> F64:
    """The n-th lowest cost of each row, [B]; the largest number where fewer are finite, or no more than n there."""
    limit = np.full(len(total), np.finfo(np.float64).max)
    return np.fmin(limit, np.partition(total, n - 1, axis=1)[:, n - 1]) if n < total.shape[1] else limit


def _grow_bounded(ids: I32, cost: F64, root: I32, budget: int, most: int) -> Forest | None:
    """As `_grow_table`, for many candidates: level by level, and only below prefixes within a bound.

    The bound of a stream is the cost of the last node among the candidates of a smaller tree: so many are at least as good. None
    where more than `most` prefixes lie within, as where many are equal.
    """
    streams, depth, choices = cost.shape
    few = candidates(max(budget // 4, 16), depth, choices)
    if few is None or len(few.order) <= budget:
        return None
    limit = _nth(_score(cost, few), budget)
    flat = np.ascontiguousarray(cost).reshape(-1, choices)
    stream, total, path, node = np.arange(streams), np.zeros(streams), np.zeros(streams, np.int64), np.full(streams, -1)
    levels: list[tuple[Array, ...]] = []
    found = 0
    for d in range(depth):
        children = flat[stream * depth + d] + total[:, None]
        alive = np.flatnonzero(children <= limit[stream][:, None])
        above, rank = np.divmod(alive, choices)
        stream, total = stream[above], children.ravel()[alive]
        path = path[above] + (rank + 1) * (choices + 1) ** (depth - 1 - d)  # sorts as rank tuples do, a prefix before its extensions
        levels.append((stream, total, path, node[above], rank, np.full(len(alive), d + 1)))
        node = np.arange(found, found + len(alive))
        found += len(alive)
        if found > most:
            return None
    end = (np.zeros(1, np.int64), np.full(1, np.inf), np.zeros(1, np.int64), np.full(1, -1), np.zeros(1, np.int64), np.ones(1, np.int64))
    of, total, path, parent, rank, level = (np.concatenate(parts) for parts in zip(*levels, end, strict=True))  # `found` is no node
    order = np.argsort(of[:-1].astype(np.int16), kind="stable")
    counts = np.bincount(of[:-1], minlength=streams)
    size = np.minimum(counts, budget)
    picked = np.full((streams, max(int(counts.max()), 1)), found)
    picked[of[order], np.arange(found) - np.repeat(np.cumsum(counts) - counts, counts)] = order
    ranking = np.lexsort((path[picked], total[picked]), axis=-1)[:, :budget]
    picked = np.take_along_axis(picked, ranking, axis=1)
    node_of = np.zeros(found + 1, np.int16)
    node_of[picked] = np.arange(1, picked.shape[1] + 1, dtype=np.int16)
    node_of[-1] = 0  # padding, and where parent -1 points
    forest = _roots(root, picked.shape[1])
    forest.parent[:, 1:] = node_of[parent[picked]]
    forest.depth[:, 1:] = level[picked]
    forest.token[:, 1:] = ids[np.arange(streams)[:, None], level[picked] - 1, rank[picked]]
    forest.key[:, 1:] = -total[picked]
    forest.size[:] = size
    return forest


def _rows_of(kept: Array, counts: I64) -> tuple[I64, Bools]:
    """Returns the kept columns of each row, [B, largest count], padded with column 0, and where that is."""
    streams, count = kept.shape
    flat = np.flatnonzero(kept)
    widest = int(counts.max())
    padded = np.arange(widest) >= counts[:, None]
    if len(flat) == padded.size:
        return flat.reshape(streams, widest) - np.arange(0, streams * count, count)[:, None], padded
    columns = np.zeros((streams, widest), np.int64)
    columns[~padded] = flat - np.repeat(np.arange(0, streams * count, count), counts)
    return columns, padded


def _grow_heap(ids: I32, cost: F64, budget: int) -> list[Node]:
    """Grows one stream with a heap, in pop order. Ties compare rank tuples."""
    tokens, costs = ids.tolist(), cost.tolist()
    depth, choices = cost.shape
    nodes: list[Node] = []
    frontier: list[tuple[float, tuple[int, ...], int, float]] = []  # cost, ranks, parent node, parent's cost

    def push(ranks: tuple[int, ...], parent: int, above: float) -> None:
        last = costs[len(ranks) - 1][ranks[-1]]
        if last < np.inf:  # NaN would break the heap's order
            heapq.heappush(frontier, (above + last, ranks, parent, above))

    push((0,), 0, 0.0)
    while frontier and len(nodes) < budget:
        total, ranks, parent, above = heapq.heappop(frontier)
        d, r = len(ranks), ranks[-1]
        nodes.append((tokens[d - 1][r], parent, d, -total))
        if r + 1 < choices:
            push((*ranks[:-1], r + 1), parent, above)
        if d < depth:
            push((*ranks, 0), len(nodes), total)
    return nodes


def _stack(root: I32, streams: list[list[Node]]) -> Forest:
    forest = _roots(root, max(map(len, streams)))
    for b, nodes in enumerate(streams):
        forest.size[b] = n = len(nodes)
        if n:
            new = slice(1, n + 1)
            forest.token[b, new], forest.parent[b, new], forest.depth[b, new], forest.key[b, new] = zip(*nodes, strict=True)
    return forest


def _roots(root: I32, nodes: int = 0) -> Forest:
    """A forest with room for `nodes` under each root, its size still 0."""
    shape = (len(root), nodes + 1)
    token, parent, depth = np.empty(shape, np.int32), np.full(shape, -1, np.int16), np.zeros(shape, np.int16)
    token[:, 0] = root
    return Forest(token, parent, depth, np.zeros(shape), np.zeros(len(root), np.int64))


def _budgets(budget: int | Sequence[int], streams: int) -> I64:
    budgets = np.full(streams, budget, np.int64) if isinstance(budget, (int, np.integer)) else np.asarray(budget, np.int64)
    if budgets.shape != (streams,) or budgets.min(initial=0) < 0:
        raise ValueError(f"budget: {budget!r} must be one number >= 0, or one for each of {streams} streams")
    return budgets
