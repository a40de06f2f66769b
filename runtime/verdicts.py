"""Acceptance for all trees of a step at once, with a lookout for rows that are not finite.

`runtime.accept.accept` defines the walk down one tree; it looks at every node. Here each node
on the path is looked up in a table that is made while the step runs, and tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.grove import Grove
from runtime.types import I32, Bools, DraftTree


@dataclass(slots=True)
class Verdict:
    """What the target's draws make of one tree."""

    path: list[int]  # accepted nodes, root first, up to the first row that is not finite
    tokens: list[int]  # the target's token at each of them: what is emitted
    corrupted: bool  # a row of the path was not finite
    first_out: int  # the root's place among the step's out_rows


def judge(trees: Sequence[DraftTree], target: I32, sound: Bools) -> list[Verdict]:
    """Walks every tree as `accept` does and ends each path before its first unsound row.

    trees: in the order of the out_rows, T nodes in all; target: [T] i32; sound: [T], False where the
    row's token means nothing. A row off the path changes nothing: plain decoding would not see it.
    """
    grove, drawn, every = Grove.of(trees), target.tolist(), bool(sound.all())
    if grove.bare and every:
        return [Verdict([0], [token], False, row) for row, token in enumerate(drawn)]
    below, good, verdicts = grove.children.get, None if every else sound.tolist(), list[Verdict]()
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
