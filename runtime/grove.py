"""The draft trees of a step, one after the other in flat arrays: made, planned and judged in one pass over all nodes.

64 streams of 4 nodes are 256 nodes: one pass of NumPy over them costs what a pass over a single tree does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import overload

import numpy as np

from runtime.types import I16, I32, I64, U64, DraftTree


class Grove(Sequence[DraftTree]):
    """B trees of T nodes in all. Never changed once made; a single tree is a view, made when it is asked for."""

    def __init__(self, token: I32, parent: I16, depth: I16, sizes: list[int]) -> None:
        self.token, self.parent, self.depth = token, parent, depth  # [T] each, as in DraftTree
        self.sizes = sizes  # [B] nodes, root included

    @staticmethod
    def of(trees: Sequence[DraftTree]) -> Grove:
        """Any trees. Raises ValueError for one whose nodes do not come after their parents."""
        if isinstance(trees, Grove):
            return trees
        if not trees:
            return Grove(np.zeros(0, np.int32), np.zeros(0, np.int16), np.zeros(0, np.int16), [])
        token, sizes = np.concatenate([tree.token for tree in trees]), [len(tree.token) for tree in trees]
        parent, depth = np.concatenate([tree.parent for tree in trees]), np.concatenate([tree.depth for tree in trees])
        found = Grove(token, parent, depth, sizes)
        node: I64 = found.lines.node
        bad = np.flatnonzero((parent >= node) | (parent < -1) | ((parent < 0) != (node == 0)))
        if len(bad):
            raise ValueError(f"draft tree: node {node[bad[0]]} has parent {parent[bad[0]]}; a root has -1, any other node a smaller one")
        return found

    @staticmethod
    def roots(tokens: Sequence[int]) -> Grove:
        """Trees of a root each."""
        return Grove(np.array(tokens, np.int32), *_bare(len(tokens)))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> DraftTree: ...

    @overload
    def __getitem__(self, index: slice) -> list[DraftTree]: ...

    def __getitem__(self, index: int | slice) -> DraftTree | list[DraftTree]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        end = self.lines.ends[index]
        first = end - self.sizes[index]
        return DraftTree(self.token[first:end], self.parent[first:end], self.depth[first:end])

    def __iter__(self) -> Iterator[DraftTree]:
        return map(self.__getitem__, range(len(self)))

    @property
    def bare(self) -> bool:
        """Roots alone."""
        return len(self.token) == len(self.sizes)

    @cached_property
    def lines(self) -> Lines:
        return _lines(tuple(self.sizes))

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """The node below a node by a token, both counted over all trees; of twins (malformed, see `tree.check_tree`) the first."""
        parent, token, start = self.parent.tolist(), self.token.tolist(), self.lines.start.tolist()
        nodes = reversed(range(len(token)))
        return {(start[node] + parent[node], token[node]): node for node in nodes if parent[node] >= 0}

    @cached_property
    def leaps(self) -> list[I64]:
        """[T] each: the node 1, 2, 4 … above every node, or its root; as many as the deepest node needs."""
        first, leap = self.lines.first, self.parent + self.lines.start
        leap[first] = first
        found = []
        for _ in range(int(np.maximum.reduce(self.depth, initial=0)).bit_length()):
            found.append(leap)
            leap = leap.take(leap)
        return found

    @cached_property
    def single(self) -> bool:
        """No two nodes are one token below one parent: a draw leads to one node at most."""
        if self.bare:
            return True
        below = np.sort((((self.parent + self.lines.start) << 32) + self.token)[self.parent >= 0])
        return bool((below[1:] != below[:-1]).all())

    def prepare(self) -> None:
        """Makes now what `runtime.verdicts` will look at."""
        _ = self.single, self.leaps

    def ancestors(self, words: int) -> U64:
        """[T, words] bit j of a node's row is set iff j is the node, in its own tree, or above it. By doubling the leap."""
        bits = self.lines.bits
        if words > 1:
            node = self.lines.node
            bits = np.zeros((len(node), words), np.uint64)
            bits[np.arange(len(node)), node // 64] = self.lines.bits
        for leap in self.leaps:
            bits = bits | bits.take(leap, axis=0)
        return bits.reshape(-1, words)


@dataclass(frozen=True, slots=True)
class Lines:
    """How the nodes of trees of given sizes lie."""

    ends: list[int]  # [B] one past each tree's last node
    edges: I64  # [B + 1] 0 and those
    first: I64  # [B] each tree's root
    start: I64  # [T] the root of each node's tree
    node: I64  # [T] its place in the tree
    bits: U64  # [T] bit node % 64


@lru_cache(maxsize=64)
def _lines(sizes: tuple[int, ...]) -> Lines:
    """Trees of one size come step after step."""
    edges = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    first, ends = edges[:-1], edges[1:].tolist()
    start = np.repeat(first, sizes)
    node = np.arange(len(start)) - start
    return Lines(ends, edges, first, start, node, np.left_shift(np.uint64(1), (node % 64).astype(np.uint64)))


class Offer(Mapping[str, DraftTree]):
    """Trees by the ids of the sequences that they are for. Who takes all of them need not look up any."""

    def __init__(self, ids: list[str], trees: Sequence[DraftTree]) -> None:
        if len(ids) != len(trees):
            raise ValueError(f"draft trees: {len(trees)} for {len(ids)} roots; a speculator makes one for each")
        self.ids, self.trees = ids, trees

    @cached_property
    def _places(self) -> dict[str, int]:
        return {id: at for at, id in enumerate(self.ids)}

    def __getitem__(self, id: str) -> DraftTree:
        return self.trees[self._places[id]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


@cache
def _bare(count: int) -> tuple[I16, I16, list[int]]:
    """Parents, depths and sizes of so many roots."""
    return np.full(count, -1, np.int16), np.zeros(count, np.int16), [1] * count
