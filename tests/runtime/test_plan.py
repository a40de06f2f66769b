"""The step plan as bytes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from runtime.plan import STEP_FIELDS, DraftLayout, Packer, PlanLayout, PlanOverflow, pack_draft, pack_plan, unpack_draft, unpack_plan
from runtime.types import DraftPlan, StepPlan
from tests.plans import make_plan, page_table, random_parents

LAYOUT = PlanLayout(max_rows=64, max_seqs=8, max_pages=12, max_words=2, max_moves=16, max_adjust=32, mask_words=3)


def sample_plan(seed: int) -> StepPlan:
    rng = np.random.default_rng(seed)
    parents = [random_parents(rng, int(n)) for n in rng.integers(1, 12, 4)]
    plan = make_plan([rng.integers(0, 99, len(p)) for p in parents], parents, rng.integers(0, 90, 4), page_table(4, 8, rng))
    return replace(
        plan,
        bucket=64,
        moves=rng.integers(0, 99, (5, 2)).astype(np.int32),
        seed=rng.integers(0, 2**64, 4, dtype=np.uint64),
        adjust_row=rng.integers(0, 9, (3, 2)).astype(np.int32),
        adjust_row_by=rng.random((3, 2)).astype(np.float32),
        mask_rows=np.array([1, 4], np.int32),
        masks=rng.integers(0, 2**32, (2, 3), dtype=np.uint32),
    )


def equal(a: StepPlan, b: StepPlan) -> bool:
    return a.bucket == b.bucket and all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name)) and getattr(a, f.name).dtype == getattr(b, f.name).dtype
        for f in fields(StepPlan)
        if f.name != "bucket"
    )


def test_round_trip_over_a_dirty_blob() -> None:
    blob = np.full(LAYOUT.nbytes, 0xFF, np.uint8)
    for seed in range(50):
        plan = sample_plan(seed)
        pack_plan(plan, LAYOUT, blob)
        assert equal(unpack_plan(blob, LAYOUT), plan)
    other = sample_plan(999)
    assert not equal(unpack_plan(blob, LAYOUT), other)


def test_what_comes_again_is_not_written_again() -> None:
    """Plan after plan over one blob, some arrays the very ones of the plan before: read back as made, also after one too large."""
    blob, rng = np.full(LAYOUT.nbytes, 0xFF, np.uint8), np.random.default_rng(3)
    packer, plan = Packer(LAYOUT, blob), sample_plan(0)
    for seed in range(50):
        other = sample_plan(seed)
        plan = replace(plan, bucket=seed, **{name: getattr(other, name) for name in STEP_FIELDS if rng.random() < 0.5})
        if seed % 7 == 0:
            with pytest.raises(PlanOverflow, match="moves"):
                packer.pack(replace(other, moves=np.zeros((LAYOUT.max_moves + 1, 2), np.int32)))
            with pytest.raises(ValueError, match="the blob begins with"):
                unpack_plan(blob, LAYOUT)
        packer.pack(plan)
        assert equal(unpack_plan(blob, LAYOUT), plan)
    blob[LAYOUT.offsets()[0]["token"]] ^= 1
    packer.pack(plan)
    assert not equal(unpack_plan(blob, LAYOUT), plan), "the fault stays: nothing was written"


def test_offsets_depend_on_the_layout_alone() -> None:
    offsets, size = LAYOUT.offsets()
    assert all(at % 16 == 0 for at in offsets.values()) and size % 16 == 0
    blob = np.zeros(size, np.uint8)
    plan = sample_plan(1)
    pack_plan(plan, LAYOUT, blob)
    at = offsets["slot"]
    assert np.array_equal(blob[at : at + 4 * plan.m].view(np.int32), plan.slot)


def test_overflow_names_the_field() -> None:
    plan = sample_plan(2)
    with pytest.raises(PlanOverflow, match=r"moves is \[5, 2\], the layout holds \[4, 2\]"):
        pack_plan(plan, replace(LAYOUT, max_moves=4), np.zeros(LAYOUT.nbytes, np.uint8))
    with pytest.raises(PlanOverflow, match=r"masks is \[2, 3\], the layout holds \[64, 2\]"):
        pack_plan(plan, replace(LAYOUT, mask_words=2), np.zeros(LAYOUT.nbytes, np.uint8))
    with pytest.raises(PlanOverflow, match="token"):
        pack_plan(plan, replace(LAYOUT, max_rows=3), np.zeros(LAYOUT.nbytes, np.uint8))


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="begins with"):
        unpack_plan(np.zeros(LAYOUT.nbytes, np.uint8), LAYOUT)
    with pytest.raises(ValueError, match="has 100 bytes"):
        unpack_plan(np.zeros(100, np.uint8), LAYOUT)


def test_draft_plans_too() -> None:
    layout = DraftLayout(max_streams=8, max_pages=12, max_taps=20)
    blob = np.full(layout.nbytes, 0xFF, np.uint8)
    rng = np.random.default_rng(3)
    for streams, taps in ((3, 5), (0, 4), (8, 0), (0, 0)):
        whole = [rng.integers(0, 99, n).astype(np.int32) for n in (streams, streams, taps, taps, taps)]
        pages = rng.integers(0, 99, (streams, 7 if streams else 0)).astype(np.int32)
        plan = DraftPlan(whole[0], whole[1], pages, *whole[2:])
        pack_draft(plan, layout, blob)
        seen = unpack_draft(blob, layout)
        for field in fields(DraftPlan):
            np.testing.assert_array_equal(getattr(seen, field.name), getattr(plan, field.name), err_msg=field.name)
    with pytest.raises(PlanOverflow, match=r"draft plan: tap_rows is \[21\], the layout holds \[20\]"):
        pack_draft(replace(plan, tap_rows=np.zeros(21, np.int32)), layout, blob)
    with pytest.raises(ValueError, match="step plan: the blob begins with"):
        unpack_plan(np.concatenate([blob, np.zeros(LAYOUT.nbytes, np.uint8)]), LAYOUT)
