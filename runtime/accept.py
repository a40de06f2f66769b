"""Acceptance: the walk of the target's draws down a draft tree.

At every node the target drew one token from its own distribution (keyed by request seed and
position). Where a child carries that token the walk goes on, else the draw is the new bonus. Each
emitted token is therefore an exact draw given its prefix; the drafter's probabilities never enter.
Source: arXiv 2604.12989 (DDTree), section on verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.types import I32, Acceptance, DraftTree


def accept(tree: DraftTree, target: I32) -> Acceptance:
    """Walks from the root to the last node whose token the target drew at its parent.

    target: [T] i32, target[t] is the one token drawn at node t. The path starts with the root (node
    0, committed with it) and need not be a prefix of the nodes; tokens = target[path]: the accepted
    nodes' tokens, then the bonus; moves pair each accepted node with its place on the path where
    the two differ. Of twins (malformed, see `check_tree`) the first wins.
    Raises ValueError unless there is one draw a node. Cost: one sweep, since parent[t] < t.
    """
    if len(target) != len(tree):
        raise ValueError(f"accept: {len(target)} target tokens for a tree of {len(tree)} nodes; the target draws once at every node")
    drawn = target.tolist()
    current, wanted = 0, drawn[0]
    path = [0]
    for node, (above, token) in enumerate(zip(tree.parent.tolist(), tree.token.tolist(), strict=True)):
        if above == current and token == wanted:
            current, wanted = node, drawn[node]
            path.append(node)
    tokens = [drawn[node] for node in path]
    moves = [(node, place) for place, node in enumerate(path) if node != place]
    return Acceptance(
        np.array(path, np.int32),
        np.array(tokens, np.int32),
        np.array(moves, np.int32).reshape(-1, 2),
    )


def ranks_of(tree: DraftTree, nodes: Sequence[int]) -> tuple[int, ...]:
    """The place of each node among its siblings, 0 the first: the likeliest, in a tree that was grown best first."""
    return tuple(int(np.count_nonzero(tree.parent[1:node] == tree.parent[node])) for node in nodes)
