"""Speculators: what they ask of the drafter, and what becomes of its answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.config import SpeculativeConfig
from runtime.speculate import NoSpeculation, Root, Taps, TreeSpeculation, first_nodes, make_draft_plan, make_speculator
from runtime.stats import EngineStats
from runtime.tree import check_tree, grow
from runtime.types import DraftLogits, DraftPlan, DraftTree
from runtime.worker import Limits

DEPTH, TOP_K = 5, 4


class Drafter:
    """Gives fixed logits, one set for each root token, and remembers its plans."""

    limits = Limits(100, 64, 32, 4, 256, DEPTH, TOP_K)

    def __init__(self) -> None:
        self.plans: list[DraftPlan] = []

    def draft(self, plan: DraftPlan) -> DraftLogits:
        self.plans.append(plan)
        logits = [logits_for(token) for token in plan.root.tolist()]
        empty = np.zeros((0, DEPTH, TOP_K))
        ids, logp = [np.stack(part) if logits else empty for part in zip(*logits, strict=True)] if logits else (empty, empty)
        return DraftLogits(ids.astype(np.int32), logp.astype(np.float32))

    def step(self, plan: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...


def logits_for(token: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(token)
    ids = np.stack([rng.permutation(100)[:TOP_K] for _ in range(DEPTH)])
    return ids, np.sort(np.log(rng.dirichlet(np.ones(TOP_K), DEPTH)), axis=1)[:, ::-1]


def root(token: int, length: int = 6, *, nodes: int = 16, depth: int = 9, pages: tuple[int, ...] = (3, 1)) -> Root:
    tokens = np.array([7] * (length - 1) + [token], np.int32)
    return Root(f"r{token}", tokens, np.array(pages, np.int32), nodes, depth)


def speculator(**config: Any) -> tuple[TreeSpeculation, Drafter]:
    drafter = Drafter()
    return TreeSpeculation(drafter, SpeculativeConfig.parse(config)), drafter


def equal(a: DraftTree, b: DraftTree) -> bool:
    return all(np.array_equal(x, y) for x, y in ((a.token, b.token), (a.parent, b.parent), (a.depth, b.depth)))


def test_the_plan_names_roots_pages_and_taps() -> None:
    taps = Taps(np.array([4, 6], np.int32), np.array([9, 10], np.int32), np.array([33, 34], np.int32))
    plan = make_draft_plan([root(5), root(6, 9, pages=(2, 4, 8))], taps)
    assert plan.root.tolist() == [5, 6] and plan.pos.tolist() == [5, 8]
    assert plan.pages.tolist() == [[3, 1, 0], [2, 4, 8]]
    assert (plan.tap_rows.tolist(), plan.tap_pos.tolist(), plan.tap_slot.tolist()) == ([4, 6], [9, 10], [33, 34])
    assert {getattr(plan, name).dtype for name in ("root", "pos", "pages", "tap_rows", "tap_pos", "tap_slot")} == {np.dtype(np.int32)}
    none = make_draft_plan([], Taps.none())
    assert none.pages.shape == (0, 0) and len(none.root) == 0


def test_taps_are_written_even_when_nobody_drafts() -> None:
    spec, drafter = speculator()
    assert spec.propose([], Taps.none(), EngineStats())() == [] and not drafter.plans
    taps = Taps(*(np.array([1], np.int32),) * 3)
    assert spec.propose([], taps, EngineStats())() == []
    assert [(len(plan.root), plan.tap_rows.tolist()) for plan in drafter.plans] == [(0, [1])]


def test_each_root_gets_the_tree_of_its_own_budget_and_depth() -> None:
    spec, drafter = speculator(tree_budget=12)
    roots = [root(1), root(2, nodes=3), root(3, depth=1), root(4, nodes=1), root(5, depth=2)]
    trees = spec.propose(roots, Taps.none(), EngineStats())()
    assert len(drafter.plans) == 1
    for asked, tree in zip(roots, trees, strict=True):
        ids, logp = logits_for(asked.token)
        logits = DraftLogits(ids[None].astype(np.int32), logp[None].astype(np.float32))
        [want] = grow(logits, np.array([asked.token], np.int32), min(12, asked.nodes), min(DEPTH, asked.depth))
        assert equal(tree, want)
        check_tree(tree)
        assert tree.depth.max() <= asked.depth and len(tree) <= 1 + asked.nodes
    assert [len(tree) for tree in trees] == [13, 4, 5, 2, 13]


def test_choices_and_depth_are_cut_as_configured() -> None:
    spec, _ = speculator(tree_budget=60, draft_top_k=1, num_speculative_tokens=3)
    [tree] = spec.propose([root(1)], Taps.none(), EngineStats())()
    assert tree.parent.tolist() == [-1, 0, 1, 2] and tree.token[1:].tolist() == logits_for(1)[0][:3, 0].tolist()


def test_dflash_is_the_top_1_chain() -> None:
    spec, _ = speculator(method="dflash", num_speculative_tokens=4)
    assert (spec.nodes, spec.depth) == (4, 4)
    trees = spec.propose([root(1), root(2, nodes=2), root(3, depth=1)], Taps.none(), EngineStats())()
    assert [len(tree) for tree in trees] == [5, 3, 2]
    for tree in trees:
        assert tree.parent.tolist() == list(range(-1, len(tree) - 1))
        assert tree.token[1:].tolist() == logits_for(int(tree.token[0]))[0][: len(tree) - 1, 0].tolist()


def test_the_first_nodes_of_a_tree_are_the_smaller_tree() -> None:
    spec, _ = speculator(tree_budget=16)
    [large] = spec.propose([root(9)], Taps.none(), EngineStats())()
    for nodes in range(1, 16):
        [small] = spec.propose([root(9, nodes=nodes)], Taps.none(), EngineStats())()
        assert equal(first_nodes(large, 1 + nodes), small)
    assert first_nodes(large, 99) is large


def test_stages_are_timed() -> None:
    spec, _ = speculator()
    stats = EngineStats()
    spec.propose([root(1)], Taps.none(), stats)()
    assert stats.stage_s["draft"] > 0 and stats.stage_s["grow"] > 0 and stats.stage_s["plan"] == 0


def test_plain_decoding_proposes_roots_alone() -> None:
    spec = make_speculator(Drafter(), SpeculativeConfig())
    assert isinstance(spec, NoSpeculation) and spec.nodes == 0
    assert [tree.token.tolist() for tree in spec.propose([root(4)], Taps.none(), EngineStats())()] == [[4]]


def test_a_drafter_that_can_not_is_refused() -> None:
    class Without(Drafter):
        limits = Limits(100, 64, 32, 4, 256, 0)

    with pytest.raises(ValueError, match="'dflash' needs a drafter"):
        make_speculator(Without(), SpeculativeConfig(method="dflash"))
    with pytest.raises(ValueError, match="num_speculative_tokens is 6, the drafter predicts 5"):
        make_speculator(Drafter(), SpeculativeConfig(method="ddtree", num_speculative_tokens=6))
