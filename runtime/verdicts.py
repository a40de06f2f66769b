"""Acceptance for all trees of a step at once, with a lookout for rows that are not finite.

`runtime.accept.accept` defines the walk down one tree; it looks at every node. Here all trees are walked in one pass over all
nodes where every row is sound, else each node on the path is looked up in a table. Tests hold the three equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from runtime.grove import Grove
from runtime.types import I32, I64, Bools, DraftTree


@dataclass(slots=True)
class Verdict:
    """What the target's draws make of one tree."""

    path: list[int]  # accepted nodes, root first, up to the first row that is not finite
    tokens: list[int]  # the target's token at each of them: what is emitted
    corrupted: bool  # a row of the path was not finite
    first_out: int  # the root's place among the step's out_rows


class Walks(Sequence[Verdict]):
    """Verdicts in columns, none of them corrupted: 64 trees take what one does, and single verdicts are made when there is time."""

    def __init__(self, grove: Grove, rows: I64, edges: I64, tokens: list[int]) -> None:
        self.grove = grove
        self.rows = rows  # [n] accepted nodes, counted over all trees, rising
        self.edges = edges  # [B + 1] where each tree's begin among them, and n
        self.tokens = tokens  # [n] the target's token at each

    @cached_property
    def counts(self) -> I64:
        """[B] accepted nodes of each tree, its root included."""
        found: I64 = self.edges[1:] - self.edges[:-1]
        return found

    @property
    def places(self) -> I64:
        """[n] their places were each tree a chain of accepted nodes."""
        lines = self.grove.lines
        return np.arange(len(self.rows)) + (lines.first - self.edges[:-1]).repeat(self.counts)

    def __len__(self) -> int:
        return len(self.grove)

    @overload
    def __getitem__(self, index: int) -> Verdict: ...

    @overload
    def __getitem__(self, index: slice) -> list[Verdict]: ...

    def __getitem__(self, index: int | slice) -> Verdict | list[Verdict]:
        return self.each[index]

    def __iter__(self) -> Iterator[Verdict]:
        yield from self.each  # made when the first one is asked for, not before

    @cached_property
    def each(self) -> list[Verdict]:
        lines, tokens, edges = self.grove.lines, self.tokens, self.edges.tolist()
        paths = (self.rows - lines.start.take(self.rows)).tolist()
        spans = zip(edges, edges[1:], lines.first.tolist(), strict=False)
        return [Verdict(paths[at:end], tokens[at:end], False, first) for at, end, first in spans]


def judge(trees: Sequence[DraftTree], target: I32, sound: Bools) -> Sequence[Verdict]:
    """Walks every tree as `accept` does and ends each path before its first unsound row.

    trees: in the order of the out_rows, T nodes in all; target: [T] i32; sound: [T], False where the
    row's token means nothing. A row off the path changes nothing: plain decoding would not see it.
    """
    grove, every = Grove.of(trees), np.count_nonzero(sound) == len(sound)
    if every and grove.single:
        return _walk(grove, target)
    drawn, below, good, verdicts = target.tolist(), grove.children.get, None if every else sound.tolist(), list[Verdict]()
    at = 0
    for size in grove.sizes:
        node: int | None = at
        found = Verdict([], [], False, at)
        while node is not None:
            if good is not None and not good[node]:
                found.corrupted = True
                break
            token = drawn[node]
            found.path.append(node - at)
            found.tokens.append(token)
            node = below((node, token))
        verdicts.append(found)
        at += size
    return verdicts


def _walk(grove: Grove, target: I32) -> Walks:
    """A node is on a path if the target drew its token at its parent, and that of every node above it likewise; by doubling the leap."""
    lines = grove.lines
    if grove.bare:
        return Walks(grove, lines.first, lines.edges, target.tolist())
    on = grove.token == target.take(grove.leaps[0])
    on[lines.first] = True
    for leap in grove.leaps:
        on &= on.take(leap)
    rows = on.nonzero()[0]
    return Walks(grove, rows, rows.searchsorted(lines.edges), target.take(rows).tolist())
