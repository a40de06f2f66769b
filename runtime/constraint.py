"""What an output must look like: as a user states it, and as the engine asks a compiled form of it.

The engine knows no grammar. Before every step it asks each constrained sequence which tokens may follow
each node of its draft tree; the answers ride in the step plan as masks, one bit a token. A node is
judged by its own path, so a text is the same with and without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.types import I32, U32, DraftTree, InvalidRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of these; field names are vLLM's. A compiler checks them (model/grammar.py)."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, an object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None
    lark: str | None = None  # Lark with token ids, as model/grammar.py writes it; never out of a request


class ConstraintState(Protocol):
    """One generation under a constraint; called from one thread at a time, masks() not always from the same one."""

    error: str | None  # why the constraint can say no more; the request is then ended

    def masks(self, tree: DraftTree) -> tuple[I32, U32]:
        """Nodes [g] i32, rising, whose next token is constrained, and their masks [g, W] u32.

        Bit i % 32 of word i / 32 says that token i may follow; W = ceil(V / 32). Nodes that the
        constraint itself forbids are left out: their parents' masks keep them from being accepted.
        """

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without the nodes that the constraint forbids, and without what stands below them."""

    def push(self, tokens: Sequence[int]) -> None:
        """Takes committed tokens, the bonus included, in order."""


class Constraint(Protocol):
    """A compiled constraint: immutable, shared by the choices of a request."""

    def start(self) -> ConstraintState: ...


def check_sampling(params: SamplingParams) -> None:
    """Raises InvalidRequest for what would carry an output on past the end that its constraint gives it."""
    if params.min_tokens:
        raise InvalidRequest("min_tokens", "not together with structured output or a forced tool call, which say themselves when they end")
    if params.ignore_eos:
        raise InvalidRequest("ignore_eos", "not together with structured output or a forced tool call, which say themselves when they end")
