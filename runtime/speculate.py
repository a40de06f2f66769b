"""Where draft trees come from: the drafter's block for each root, grown into trees or cut to chains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, overload, runtime_checkable

import numpy as np

from runtime.config import DEFAULT_TREE_BUDGET, SpeculativeConfig
from runtime.executor import Executor, begin_draft
from runtime.flight import Flight, Rehearsal
from runtime.grove import Grove
from runtime.sequence import Sequence
from runtime.stats import EngineStats
from runtime.tree import chain, grow
from runtime.types import I32, DraftLogits, DraftPlan, DraftTree


@dataclass(slots=True)
class Root:
    """A sequence that wants a draft: its newest token, and how far a draft may reach. Not to be changed: not frozen, for speed."""

    id: str
    tokens: I32  # [L] view; the root is the last, at position L - 1
    pages: I32  # [p] view; they hold positions 0 … L - 1
    nodes: int  # most nodes besides the root, at least 1
    depth: int  # greatest depth of use: with the bonus token no more is left to emit
    most: int = 0  # nodes that the sequence has room for if others take fewer than their even share; 0: `nodes`
    weight: float = 1.0  # what a token of it is worth beside those of other roots

    @property
    def token(self) -> int:
        return int(self.tokens[-1])

    @property
    def pos(self) -> int:
        return len(self.tokens) - 1


class Roots(SequenceOf[Root]):
    """Roots of running sequences in columns, [B] each: a launch waits for what it needs of them, and single ones can be made later."""

    def __init__(self, sequences: list[Sequence], nodes: list[int], depth: list[int], most: list[int], pages: I32 | None = None) -> None:
        self.sequences, self.nodes, self.depth, self.most = sequences, nodes, depth, most
        self.pages = pages  # [B, P] their page tables, if at hand

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, index: int) -> Root: ...

    @overload
    def __getitem__(self, index: slice) -> list[Root]: ...

    def __getitem__(self, index: int | slice) -> Root | list[Root]:
        return self.each[index]

    @cached_property
    def each(self) -> list[Root]:
        now_s = time.monotonic()
        columns = zip(self.sequences, self.nodes, self.depth, self.most, strict=True)
        return [Root(s.id, s.tokens, s.pages, nodes, depth, most, s.draft_weight(now_s)) for s, nodes, depth, most in columns]

    @staticmethod
    def columns(roots: SequenceOf[Root]) -> tuple[list[int], list[int]]:
        """Tokens and positions of any roots."""
        if isinstance(roots, Roots):
            held = roots.sequences
            return [s.newest for s in held], [s.length - 1 for s in held]
        return [root.token for root in roots], [root.pos for root in roots]

    @staticmethod
    def limits(roots: SequenceOf[Root]) -> tuple[list[str], list[int], list[int], list[float]]:
        """Ids, most nodes, greatest depths and weights of any roots."""
        if isinstance(roots, Roots):
            now_s, held = time.monotonic(), roots.sequences
            most = [most or nodes for most, nodes in zip(roots.most, roots.nodes, strict=True)]
            return [s.id for s in held], most, roots.depth, [s.draft_weight(now_s) for s in held]
        return [r.id for r in roots], [r.most or r.nodes for r in roots], [r.depth for r in roots], [r.weight for r in roots]

    @staticmethod
    def tables(roots: SequenceOf[Root]) -> I32:
        """Their page tables, [B, P] padded with the null page."""
        if isinstance(roots, Roots) and roots.pages is not None:
            return roots.pages
        tables = [s.pages for s in (roots.sequences if isinstance(roots, Roots) else roots)]
        pages = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in zip(pages, tables, strict=True):
            row[: len(table)] = table
        return pages


@dataclass(frozen=True, slots=True)
class Taps:
    """Rows of the last step whose hidden taps become drafter context: committed tokens only."""

    rows: I32  # [n] rows of the last StepPlan
    pos: I32  # [n]
    slot: I32  # [n] where the token's K/V are at rest, after the moves that are still to come

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def none() -> Taps:
        empty = np.zeros(0, np.int32)
        return Taps(empty, empty, empty)


@dataclass(frozen=True, slots=True)
class Load:
    """What a step holds without draft nodes, as far as it can be known before."""

    decoding: int  # sequences that will emit at least one token, a root each
    prompt: int  # rows that prompt chunks take if no draft node is verified
    limit: int  # most rows of a step; past it draft nodes take the place of prompt rows
    reserved: int  # prompt rows that draft nodes may not displace
    ctx: int  # committed tokens of all running sequences


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of one tree."""

    nodes: int  # verified, root not counted: the first ones of the tree that was proposed
    path: SequenceOf[int]  # accepted nodes, root first
    sound: bool  # False: a row of the path was not finite, or a constraint took nodes out, so that `path` counts other nodes


Trees = Callable[[], SequenceOf[DraftTree]]


@runtime_checkable
class StepWatcher(Protocol):
    """A speculator that wants to know what a step holds and what became of it."""

    def before_step(self, load: Load, stats: EngineStats) -> None: ...

    def after_step(self, rows: int, bucket: int, verified: Mapping[str, Verified], experts: float, stats: EngineStats) -> None:
        """rows: live ones of the step, bucket: M that was launched, experts: StepResult.experts. What takes time waits for `learn`."""

    def learn(self) -> None:
        """Works off what `after_step` left: when the device is busy with the next step, or at once if there is none."""


class Speculator(Protocol):
    """Proposes one tree for each root. `nodes` and `depth` bound a single tree; 0 nodes: no drafting."""

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def propose(self, roots: SequenceOf[Root], taps: Taps, stats: EngineStats) -> Trees:
        """Hands a draft to the device. What is returned waits for it, once, and makes the trees: in the order of `roots`,
        node 0 the root, at most root.nodes more.

        Called once before every step, also without roots. `taps` are the last step's and are handed
        over once: a speculator that reads drafter context has to write them now. Times its work as
        the stages draft and grow of `stats`.
        """


class NoSpeculation:
    """Plain decoding: every tree is its root. The drafter, if any, is never asked, so its context is not kept."""

    nodes = 0
    depth = 0

    def propose(self, roots: SequenceOf[Root], taps: Taps, stats: EngineStats) -> Trees:
        return partial(roots_only, roots)


class TreeSpeculation:
    """DDTree (arXiv 2604.12989) over a block drafter (DFlash, arXiv 2602.06036), or that drafter's top-1 chain."""

    def __init__(self, executor: Executor, config: SpeculativeConfig) -> None:
        budget = config.tree_budget
        if isinstance(budget, str):
            raise ValueError(f"speculative_config.tree_budget: {budget!r} needs a cost curve; runtime.load measures one")
        self.depth = draft_depth(executor, config)
        self._executor = executor
        self._chain = config.method == "dflash"
        self._top_k = config.draft_top_k
        self._last: DraftLogits | None = None  # of the draft before
        self._rehearsal = Rehearsal()
        self.nodes = self.depth if self._chain else budget or DEFAULT_TREE_BUDGET

    def propose(self, roots: SequenceOf[Root], taps: Taps, stats: EngineStats) -> Trees:
        """One draft call for all roots, also when there is none but taps are due."""
        if not roots:
            write_taps(self._executor, taps, stats)
            return list
        with stats.stage("draft"):
            plan = make_draft_plan(roots, taps)
            flight = Flight(begin_draft(self._executor, plan), stats)
            grower = partial(self._grow, plan.root, *self._bounds(roots))

        def trees() -> Grove:
            last = self._last if self._last is not None and len(self._last.ids) == len(roots) else None
            with stats.stage("draft"):
                logits = self._last = flight.land(self._rehearsal, None if last is None else partial(grower, last))
            with stats.stage("grow"):
                return grower(logits)

        return trees

    def _bounds(self, roots: SequenceOf[Root]) -> tuple[list[int], int | list[int]]:
        """Nodes and depths of each tree. Near the end of a generation depth is cut: deeper nodes would be wasted rows."""
        columns = (roots.nodes, roots.depth) if isinstance(roots, Roots) else ([r.nodes for r in roots], [r.depth for r in roots])
        nodes, depths = ([min(most, count) for count in column] for most, column in zip((self.nodes, self.depth), columns, strict=True))
        if self._chain:
            nodes = [min(pair) for pair in zip(depths, nodes, strict=True)]
        return nodes, depths if min(depths) < self.depth else self.depth

    def _grow(self, tokens: I32, nodes: list[int], depths: int | list[int], logits: DraftLogits) -> Grove:
        """Trees in the order of roots."""
        logits = likeliest(logits, self._top_k)
        return chain(logits, tokens, nodes) if self._chain else grow(logits, tokens, nodes, depths)


def likeliest(logits: DraftLogits, top_k: int | None) -> DraftLogits:
    """The first `top_k` choices of each depth; None: all."""
    return logits if top_k is None else DraftLogits(logits.ids[:, :, :top_k], logits.logp[:, :, :top_k])


def roots_only(roots: SequenceOf[Root]) -> Grove:
    """Trees without a draft."""
    return Grove.roots(Roots.columns(roots)[0])


def write_taps(executor: Executor, taps: Taps, stats: EngineStats) -> None:
    """A draft call for the sake of the drafter's context alone: nobody waits for it."""
    if len(taps):
        with stats.stage("draft"):
            executor.draft(make_draft_plan([], taps))


def make_speculator(executor: Executor, config: SpeculativeConfig) -> Speculator:
    """The speculator that a configuration asks for."""
    return TreeSpeculation(executor, config) if config.enabled else NoSpeculation()


def draft_depth(executor: Executor, config: SpeculativeConfig) -> int:
    """How deep drafts go. Raises ValueError if the executor has no drafter, or not such a deep one."""
    available = executor.limits.draft_depth
    if available < 1:
        raise ValueError(f"speculative_config: method {config.method!r} needs a drafter, the executor has none; give a folder as model")
    wanted = config.num_speculative_tokens
    if wanted is not None and wanted > available:
        raise ValueError(f"speculative_config: num_speculative_tokens is {wanted}, the drafter predicts {available}")
    return wanted or available


def make_draft_plan(roots: SequenceOf[Root], taps: Taps) -> DraftPlan:
    """The plan of one draft call, [B] roots and [n] taps."""
    tokens, places = Roots.columns(roots)
    return DraftPlan(
        root=np.array(tokens, np.int32),
        pos=np.array(places, np.int32),
        pages=Roots.tables(roots),
        tap_rows=taps.rows,
        tap_pos=taps.pos,
        tap_slot=taps.slot,
    )


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The tree of the first `count` nodes: closed, as parents come first; the best of its size if grown best first."""
    if len(tree) <= count:
        return tree
    return DraftTree(tree.token[:count], tree.parent[:count], tree.depth[:count])
