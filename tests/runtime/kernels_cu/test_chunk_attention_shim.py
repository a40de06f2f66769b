"""Long chunks in the un-absorbed form on the CPU shim against their definition: pages, lengths, company, splits, poison, faults."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu.chunk_attention import (
    ATTEND,
    EXPAND,
    NOPE,
    PLAN,
    VALUE,
    Config,
    attend_call,
    expand_call,
    list_bytes,
    plan_call,
    workspace_bytes,
)
from runtime.ops import OPS
from tests.compare import check_bitwise, check_close
from tests.mutants import mutant
from tests.runtime.kernels_cu.chunk_cases import SCALE, UNTOUCHED, Step, make_step
from tests.shim_calls import bf16, run_call
from tests.shim_device import shim_map

TOLERANCE = OPS["chunk_attention"].tolerance
ALONE = Config()
NAMES = ("q", "absorbed", "cache", "w_uk", "w_uv", "pages", "ctx", "row0", "seq", "pos")


class Run:
    """A step's three launches. blocks: of the persistent grids. rest [M] i32, value [M, A*128] f32; scratch starts as NaN."""

    def __init__(self, step: Step, get, config: Config = ALONE, blocks: int = 3, descending: bool = False, times: int = 1) -> None:
        d = step.dims
        sizes = list_bytes(d.M, step.least, d.room) | workspace_bytes(d.heads, d.room, blocks)
        self.room = {name: np.full(size, 0xFF, np.uint8) for name, size in sizes.items()}
        self.room["arrived"][:] = 0
        self.rest, self.out = np.full(d.M, -7, np.int32), np.full((d.M, d.heads * VALUE), UNTOUCHED, bf16)
        arrays = {name: getattr(step, name) for name in NAMES} | self.room | {"rest": self.rest, "value": self.out}
        at = {name: a.ctypes.data for name, a in arrays.items()}
        calls = [(PLAN, {}, plan_call(d.M, len(step.ctx), step.least, d.room, at))]
        attend = attend_call(d, blocks, at, SCALE, shim_map)
        layer = [(EXPAND, {}, expand_call(d, blocks, at, shim_map)), (ATTEND, config.defines(), attend)]
        for source, defines, call in calls + times * layer:
            run_call(get(source.replace(".cu", "_entry.cu"), defines), call, descending)
        assert not self.room["arrived"].any()  # ready for the next launch
        self.value = self.out.astype(np.float32)
        self.counts = self.room["counts"].view(np.int32)


def check(step: Step, get, **options) -> Run:
    got, rest = Run(step, get, **options), step.split()
    np.testing.assert_array_equal(got.rest, rest)
    check_close(got.value, step.reference(rest), TOLERANCE)
    return got


MIXED = {"rows": [70, 9, 1, 150], "ctx": [40, 20, 130, 0], "trees": (1,)}
CASES = {
    "one chunk, nothing before": {"heads": 2, "rows": [128], "ctx": [0]},
    "a row more than a tile, pages of 16": {"heads": 1, "rows": [129], "ctx": [1], "page": 16},
    "a short chunk behind long context": {"heads": 2, "rows": [8], "ctx": [500], "page": 32},
    "a tile's edge": {"heads": 1, "rows": [64], "ctx": [192], "page": 128},
    "two chunks, a tree, a row, dead rows": {"heads": 2, **MIXED, "bucket": 256, "sequences": 6},
    "no room for the first": {"heads": 1, "rows": [20, 10], "ctx": [300, 30], "room": 256},
    "no room for the second": {"heads": 1, "rows": [20, 20, 20], "ctx": [100, 200, 60], "room": 256},
    "odd heads, pages of 48": {"heads": 3, "rows": [30], "ctx": [95], "page": 48},
}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(shim, name):
    step = make_step(**CASES[name])
    assert (step.split() != step.seq).any()
    check(step, shim, config=Config(ping_pong=len(name) % 2 == 0))


def test_which_are_taken():
    """Chains of enough rows, in order, as long as their keys fit, rounded up to tiles."""

    def taken(**case):
        step = make_step(1, **case)
        return sorted(set(step.seq[step.split() != step.seq].tolist()))

    assert taken(**MIXED) == [0, 3] and taken(**MIXED, least=71) == [3] and taken(**MIXED, least=151) == []
    assert taken(**MIXED, room=256) == [0] and taken(**MIXED, room=384) == [0, 3]
    assert taken(rows=[200, 9], ctx=[0, 0], room=128) == [1]
    assert taken(rows=[20, 20], ctx=[0, 0], trees=(0,)) == [1]


@pytest.mark.parametrize("ping_pong", [False, True])
def test_splits_are_added_up(shim, ping_pong):
    """More blocks than items: ranges of keys, whose sum is the whole's; twice over, the counters are as they were."""
    step = make_step(1, [40, 130], [1100, 900], room=3072)
    whole = check(step, shim, config=Config(ping_pong), blocks=1)
    cut = check(step, shim, config=Config(ping_pong), blocks=7, times=2)
    assert cut.counts[:3].tolist() == [18, 3, 9]  # so two ranges each
    assert not np.array_equal(whole.value, cut.value, equal_nan=True)
    check_bitwise(Run(step, shim, Config(ping_pong), blocks=7, descending=True).out, cut.out)


@pytest.mark.parametrize("name", ["two chunks, a tree, a row, dead rows", "odd heads, pages of 48"])
def test_other_orders_have_the_same_bits(shim, name):
    """Threads the other way about, taking turns or not, any number of blocks that cuts nothing."""
    step = make_step(**CASES[name])
    want = Run(step, shim)
    for options in ({"descending": True}, {"config": Config(ping_pong=False)}, {"blocks": 1}):
        got = Run(step, shim, **options)
        check_bitwise(got.out, want.out, str(options))


def test_nothing_to_take_is_nothing_to_do(shim):
    step = make_step(2, [7, 5], [30, 0], trees=(0,))
    got = check(step, shim)
    np.testing.assert_array_equal(got.rest, step.seq)
    assert got.counts[:2].tolist() == [0, 0] and (got.value == UNTOUCHED).all() and (got.room["k"] == 0xFF).all()


def test_a_key_of_nan_reaches_later_rows_alone(shim):
    step, healthy = (make_step(1, [140], [40], seed=3) for _ in range(2))
    sick = 70
    place = 40 + sick
    step.cache[step.pages[0, place // 64] * 64 + place % 64] = np.nan
    got = Run(step, shim)
    assert np.isnan(got.value[sick:]).all()
    check_bitwise(got.out[:sick], Run(healthy, shim).out[:sick])


@pytest.mark.parametrize("fault", ["page", "length", "rope", "own key", "query", "row0", "weight"])
def test_a_fault_shows(shim, fault):
    step = make_step(2, [60], [130], bucket=64)
    want = step.reference(step.split())
    if fault == "page":
        step.pages[0] = step.pages[0, ::-1].copy()
    elif fault == "length":
        step.ctx[0] -= 1
        step.pos[:60] -= 1
    elif fault == "rope":
        step.cache[:, 512:] = -step.cache[:, 512:]
    elif fault == "own key":
        place = 130  # the first row's
        step.cache[step.pages[0, place // 64] * 64 + place % 64] *= 8
    elif fault == "query":
        step.absorbed[0] = step.absorbed[1]
    elif fault == "row0":
        step.row0[0], step.pos[:60] = 1, step.pos[:60] - 1
    else:
        step.w_uv[1, 5] = step.w_uv[1, 6]
    with pytest.raises(AssertionError):
        check_close(Run(step, shim).value, want, TOLERANCE)


FAULTS = {
    "a row sees the next key": (ATTEND, "8 * b + e > last", "8 * b + e > last + 1"),
    "a row does not see its own key": (ATTEND, "8 * b + e > last", "8 * b + e >= last"),
    "no mask in an item's first tile": (ATTEND, "if (open < 1) mask(after);", ""),
    "the other head's keys": (ATTEND, "const int first = it.head * p.room", "const int first = (it.head ^ 1) * p.room"),
    "o is not rescaled": (ATTEND, "if (warp_any(before0 != high[0] || before1 != high[1])) {", "if (false) {"),
    "a dead row is written": (ATTEND, "if (row + 8 * h < it.at.rows)", "if (it.at.row + row + 8 * h < 64)"),
    "the unrotated query": (ATTEND, "it.head * (kLatent + kRope) + kLatent", "it.head * (kLatent + kRope)"),
    "values behind the end": (EXPAND, "if (VALUES && own) {", "if (false) {"),
    "values of the wrong head": (EXPAND, "(x - kBoxes) * 64, head * kWide", "(x - kBoxes) * 64, 0"),
    "halves of w_uk changed about": (EXPAND, "tensor_copy(box, w_uk, full, 0,", "tensor_copy(box, w_uk, full, 64,"),
    "a tree is taken": (PLAN, "const bool chained = p.pos[i] - p.ctx[b] == i - p.row0[b];", "const bool chained = true;"),
    "one row too few": (PLAN, "count[b] >= p.least", "count[b] >= p.least - 1"),
    "a sequence that just fits": (PLAN, "at + tiles > p.room", "at + tiles >= p.room"),
}


QUICK = ("a row sees the next key", "o is not rescaled", "values behind the end", "one row too few")


@pytest.mark.parametrize("fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS])
def test_a_fault_in_a_kernel_shows(shim, tmp_path, fault):
    source, old, new = FAULTS[fault]
    step = make_step(2, [20, 9, 7, 12, 20], [30, 20, 30, 10, 140], trees=(1,), bucket=70, sequences=6, room=512, seed=2)
    planted = mutant(tmp_path, source, old, new)

    def get(name, defines):
        return planted(name, defines) if name == source.replace(".cu", "_entry.cu") else shim(name, defines)

    with pytest.raises(AssertionError):
        check(step, get)


def test_a_part_left_out_shows(shim, tmp_path):
    step = make_step(1, [40], [1100], room=1280)
    check(step, shim, blocks=2)
    planted = mutant(tmp_path, ATTEND, "for (int i = 0; i < splits; ++i) {", "for (int i = 1; i < splits; ++i) {")
    with pytest.raises(AssertionError):
        check(step, lambda name, defines: (planted if "attention" in name else shim)(name, defines), blocks=2)


def test_four_gigabytes_hold_131072_keys_of_64_heads():
    sizes = workspace_bytes(64, 131072, 132)
    assert sizes["k"] + sizes["v"] == 4 << 30 and sizes["part"] == 132 * 128 * VALUE * 4
    assert sizes["k"] == 64 * 131072 * NOPE * 2
