"""A bound on the reasoning: after so many tokens of it only </think> may follow.

It is a constraint like any other, so it holds at every node of a draft tree by the node's own path, and a text is the
same with and without drafts. It goes around the request's own constraint, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.tool_parser import Markers
from runtime.constraint import Constraint, ConstraintState
from runtime.types import I32, U32, DraftTree, InvalidRequest

FIELD = "thinking_token_budget"
OUTSIDE, UNBEGUN = -1, -2  # past the reasoning, before the first token; else the number of its tokens so far


class ThinkingState:
    """One generation under a bound: follows `runtime.constraint.ConstraintState`."""

    def __init__(self, bound: ThinkingBudget) -> None:
        self._bound = bound
        self._inner: ConstraintState | None = None if bound.inner is None else bound.inner.start()
        self._used = 0 if bound.in_reasoning else UNBEGUN
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error or (None if self._inner is None else self._inner.error)

    @error.setter
    def error(self, why: str | None) -> None:
        self._error = why

    def masks(self, tree: DraftTree) -> tuple[I32, U32]:
        bound, used = self._bound, self._walk(tree)
        found: dict[int, U32] = {}
        if self._inner is not None:
            nodes, bits = self._inner.masks(tree)
            found = dict(zip(nodes.tolist(), bits, strict=True))
        found.update({node: bound.only_end for node, count in enumerate(used) if count >= bound.tokens})
        order = sorted(found)
        bits = np.stack([found[node] for node in order]) if order else np.zeros((0, len(bound.only_end)), np.uint32)
        return np.array(order, np.int32), bits

    def prune(self, tree: DraftTree) -> DraftTree:
        used, kept = self._walk(tree), [True] * len(tree)
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            if node:
                kept[node] = kept[parent] and (used[parent] < self._bound.tokens or token == self._bound.end)
        if not all(kept):
            keep = np.flatnonzero(kept)
            place = np.full(len(tree) + 1, -1, np.int16)  # the last entry is that of the root's parent, -1
            place[keep] = np.arange(len(keep))
            tree = DraftTree(tree.token[keep], place[tree.parent[keep]], tree.depth[keep])
        return tree if self._inner is None else self._inner.prune(tree)

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._used = self._bound.after(self._used, token)
        if self._inner is not None:
            self._inner.push(tokens)

    def _walk(self, tree: DraftTree) -> list[int]:
        """Tokens of reasoning behind every node, the root's being those committed."""
        used = [self._used]
        for token, parent in list(zip(tree.token.tolist(), tree.parent.tolist(), strict=True))[1:]:
            used.append(self._bound.after(used[parent], token))
        return used


class ThinkingBudget:
    """At most `tokens` tokens of reasoning: follows `runtime.constraint.Constraint`.

    in_reasoning: the prompt leaves the model in it; if not, a <think> as the first token opens it, as for
    model/tool_parser.py; calls: the answer may hold some, so that the begin of one leaves the reasoning too. `inner` is
    whatever else binds the output. Raises InvalidRequest for a negative bound,
    and where the model has no </think>.
    """

    def __init__(
        self, tokens: int, markers: Markers, vocab_size: int, in_reasoning: bool, inner: Constraint | None = None, calls: bool = False
    ) -> None:
        if tokens < 0:
            raise InvalidRequest(FIELD, f"{tokens} is below 0")
        if markers.think_end is None:
            raise InvalidRequest(FIELD, "this model has no reasoning that could be bounded")
        self.tokens = tokens
        self.end = markers.think_end
        self.in_reasoning = in_reasoning
        self.inner = inner
        self._begin = markers.think_begin
        self._leaves = frozenset(
            id for id in (markers.think_end, markers.section_begin, markers.call_begin if calls else None) if id is not None
        )
        only = np.zeros(32 * -(-vocab_size // 32), np.uint8)
        only[self.end] = 1
        self.only_end: U32 = np.packbits(only, bitorder="little").view("<u4").astype(np.uint32)

    def start(self) -> ThinkingState:
        return ThinkingState(self)

    def after(self, used: int, token: int) -> int:
        """Tokens of reasoning once `token` has followed: OUTSIDE where it leaves, 0 where it opens it."""
        if used < 0:
            return 0 if used == UNBEGUN and token == self._begin else OUTSIDE
        return OUTSIDE if token in self._leaves else used + 1
