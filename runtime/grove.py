"""The draft trees of a step, one after the other in flat arrays: made, planned and judged in one pass over all nodes.

64 streams of 4 nodes are 256 nodes: a pass over them takes a microsecond or two, 64 trees of three arrays each took 100.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import overload

import numpy as np

from runtime.types import I16, I32, I64, U64, Bools, DraftTree


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
        node: I64 = np.arange(len(token)) - found.start
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
        end = self.ends[index]
        first = end - self.sizes[index]
        return DraftTree(self.token[first:end], self.parent[first:end], self.depth[first:end])

    def __iter__(self) -> Iterator[DraftTree]:
        return map(self.__getitem__, range(len(self)))

    @property
    def bare(self) -> bool:
        """Roots alone."""
        return len(self.token) == len(self.sizes)

    @cached_property
    def ends(self) -> list[int]:
        """[B] one past each tree's last node."""
        return list(accumulate(self.sizes))

    @cached_property
    def first(self) -> I64:
        """[B] each tree's root."""
        return np.array(self.ends, np.int64) - np.array(self.sizes, np.int64)

    @cached_property
    def start(self) -> I64:
        """[T] the root of each node's tree."""
        return np.repeat(self.first, self.sizes)

    @cached_property
    def leaps(self) -> list[I64]:
        """[T] each: the node 1, 2, 4 … above every node, or its root; as many as the deepest node needs."""
        leap = self.parent + self.start
        leap[self.first] = self.first
        found = []
        for _ in range(int(self.depth.max(initial=0)).bit_length()):
            found.append(leap)
            leap = leap[leap]
        return found

    def prepare(self) -> None:
        """Makes now what `accepted` will look at."""
        if not self.bare:
            _ = self.leaps, self.ends

    def ancestors(self, words: int) -> U64:
        """[T, words] bit j of a node's row is set iff j is the node, in its own tree, or above it. By doubling the leap."""
        node = np.arange(len(self.token)) - self.start
        if words == 1:
            bits = np.left_shift(np.uint64(1), node.astype(np.uint64))
        else:
            bits = np.zeros((len(node), words), np.uint64)
            bits[np.arange(len(node)), node // 64] = np.left_shift(np.uint64(1), (node % 64).astype(np.uint64))
        for leap in self.leaps:
            bits |= bits[leap]
        return bits.reshape(-1, words)

    def accepted(self, target: I32) -> Bools | None:
        """[T] nodes that lie on their tree's path: the target drew the node's token at its parent, and so on up. None if a path forks."""
        if self.bare:
            return np.ones(len(target), np.bool_)
        leaps, first = self.leaps, self.first
        taken = self.token == target[leaps[0]]
        taken[first] = True
        for leap in leaps:  # then a node knows of its 2, 4, 8 … nearest ancestors
            taken &= taken[leap]
        path = np.flatnonzero(taken)
        place = np.arange(len(path)) - np.searchsorted(path, self.start[path])
        return taken if (self.depth[path] == place).all() else None


@dataclass(frozen=True, slots=True)
class Offer(Mapping[str, DraftTree]):
    """Trees by the ids of the sequences that they are for."""

    ids: list[str]
    trees: Sequence[DraftTree]

    def __getitem__(self, id: str) -> DraftTree:
        try:
            return self.trees[self.ids.index(id)]
        except ValueError:
            raise KeyError(id) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


@cache
def _bare(count: int) -> tuple[I16, I16, list[int]]:
    """Parents, depths and sizes of so many roots."""
    return np.full(count, -1, np.int16), np.zeros(count, np.int16), [1] * count
