"""Sizes of steps, and what a probe fills them with."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.graph.buckets import DEFAULT_SIZES, fit_sizes, out_sizes, size_for
from runtime.graph.probe import Probe
from runtime.kernels_np.chunks import split_chunks
from runtime.plan import PlanLayout, pack_plan, unpack_plan


def test_sizes_end_with_the_largest_step():
    assert fit_sizes(1024) == DEFAULT_SIZES
    assert fit_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert fit_sizes(2048)[-2:] == (1024, 2048)
    assert fit_sizes(40, [8, 1, 8]) == (1, 8, 40)


@pytest.mark.parametrize(("most", "sizes", "text"), [(8, [0], "0 is not"), (8, [True], "True is not"), (8, [4, 16], "16 is above .* 8")])
def test_sizes_that_do_not_fit_are_named(most, sizes, text):
    with pytest.raises(ValueError, match=f"cudagraph_capture_sizes: {text}"):
        fit_sizes(most, sizes)


def test_the_smallest_that_holds_is_taken():
    assert [size_for((1, 4, 12), n) for n in (0, 1, 2, 4, 5, 12)] == [1, 1, 4, 4, 12, 12]
    with pytest.raises(ValueError, match="13 rows; the largest size is 12"):
        size_for((1, 4, 12), 13)


def test_wide_buckets_have_a_variant_for_prompts():
    assert out_sizes(96, 64) == (96,) and out_sizes(128, 64) == (64, 128) and out_sizes(1024, 64) == (64, 1024)
    assert out_sizes(256, 256) == (256,)


@pytest.mark.parametrize(("rows", "out"), [(1, 1), (5, 2), (64, 64), (130, 3)])
def test_a_probe_fills_its_bucket(rows, out):
    probe = Probe(streams=3, ctx=37, vocab=99, num_pages=50, page_size=16)
    plan = probe.step(rows, out)
    layout = PlanLayout(max_rows=130, max_seqs=3, max_pages=12, max_words=3, max_moves=4, max_adjust=4)
    blob = np.zeros(layout.nbytes, np.uint8)
    pack_plan(plan, layout, blob)
    assert unpack_plan(blob, layout).m == plan.m == plan.bucket == rows and len(plan.out_rows) == out
    assert (plan.pos == plan.ctx[plan.seq] + np.arange(rows) - plan.row0[plan.seq]).all() and plan.slot.min() >= 16
    assert len(set(plan.slot.tolist())) == rows, "no two rows share a slot where pages suffice"
    seen = [bin(int(word)).count("1") for word in plan.ancestors.reshape(-1)]
    assert sum(seen) == int((plan.pos - 37 + 1).sum())


@pytest.mark.parametrize(("rows", "deepest"), [(1, 3), (40, 3), (140, 7)])
def test_a_probes_trees(rows, deepest):
    """Other ancestors and positions than chains have, the rest the same."""
    given = {"streams": 2, "ctx": 37, "vocab": 99, "num_pages": 50, "page_size": 16}
    chain, tree = Probe(**given).step(rows, rows), Probe(**given, deepest=deepest).step(rows, rows)
    depth = tree.pos - tree.ctx[tree.seq]
    seen = np.unpackbits(tree.ancestors.view(np.uint8), axis=1, bitorder="little")
    node = np.arange(rows) - tree.row0[tree.seq]
    assert depth.max() == min(deepest, rows - 1) and (seen.sum(1) == depth + 1).all() and seen[np.arange(rows), node].all()
    assert seen[:, 0].all() and (depth[1:] != node[1:]).sum() == max(0, rows - 2 * (deepest + 1))
    assert (tree.slot == chain.slot).all() and (tree.token == chain.token).all()


def test_a_probes_drafts_and_keys():
    probe = Probe(streams=4, ctx=10, vocab=99, num_pages=9, page_size=16)
    plan = probe.draft(2, 3)
    assert plan.pos.tolist() == [10, 10] and plan.pages.shape == (2, 1) and plan.tap_rows.tolist() == [0, 1, 2]
    none = {"chunk_rows": 0.0, "chunk_keys": 0.0, "chunk_row_keys": 0.0}
    assert probe.known(8) == {"keys": 48, "row_keys": 8 * 10 + 4 * 3, **none}
    assert probe.known(9) == {"keys": 49, "row_keys": 9 * 10 + 6 + 3 * 3, **none}


@pytest.mark.parametrize(("rows", "deepest", "room"), [(700, 0, 4096), (700, 0, 1024), (342, 0, 4096), (700, 7, 4096), (5, 0, 4096)])
def test_a_probe_knows_which_rows_are_taken(rows, deepest, room):
    """Against the definition's choice over the very plan."""
    probe = Probe(streams=3, ctx=150, vocab=99, num_pages=99, page_size=16, deepest=deepest)
    plan = probe.step(rows, rows)
    rest = np.zeros(rows, np.int32)
    split_chunks(plan.seq, plan.pos, plan.ctx, plan.row0, 115, room, rest=rest)
    taken, seen = rest < 0, plan.ctx[plan.seq] + np.arange(rows) - plan.row0[plan.seq] + 1
    keys = sum(150 + int((plan.seq == b).sum()) for b in np.unique(plan.seq[taken]))
    want = {"chunk_rows": taken.sum(), "chunk_keys": keys, "chunk_row_keys": seen[taken].sum()}
    found = probe.known(rows, 115, room)
    assert {name: found[name] for name in want} == want and found["row_keys"] == seen.sum()
