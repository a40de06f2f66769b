"""Tree attention on the CPU shim against its definition: trees, chains, ragged batches, pages, splits, poison, bits."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from runtime.kernels_cu.tree_mla import Params, PlanParams, fill_params, workspace_bytes
from runtime.kernels_cu.tree_mla_config import Config
from runtime.ops import OPS
from tests.compare import check_bitwise, compare
from tests.runtime.kernels_cu.mla_cases import SCALE, Batch, bf16, make_batch

TILES, SPLIT, SPLITS, SLOT = 6, 7, 8, 9  # of an item's numbers
TOLERANCE = OPS["tree_mla"].tolerance
TINY = Config(octets=1, slots=17, producers=2, wgmma=False)
WIDE = Config(octets=4, slots=10, producers=4, wgmma=False)
FINE = replace(TINY, chunk=1)  # every 64 keys a split of their own


def run(batch: Batch, get, config: Config, blocks: int = 4, descending: bool = False, edit=lambda items: None) -> np.ndarray:
    """[M, A, 512] f32; the output starts as NaN, partials and items as 0xFF. blocks: how many the plan counts on; edit: of its items."""
    d = batch.dims
    room = {name: np.full(size, 0xFF, np.uint8) for name, size in workspace_bytes(d, config, blocks).items()}
    room["arrived"][:] = 0
    out = np.full((d.M, d.heads, 512), np.nan, bf16)
    arrays = {name: getattr(batch, name) for name in ("q", "cache", "pages", "ancestors", "ctx", "row0", "seq")} | room | {"out": out}
    plan, params = fill_params(d, config, {name: a.ctypes.data for name, a in arrays.items()}, SCALE, blocks)
    lib = get("mla_entry.cu", config.defines(d.heads))
    assert (lib.cpu_params_bytes(), lib.cpu_plan_bytes(), lib.cpu_item_bytes()) == (ctypes.sizeof(Params), ctypes.sizeof(PlanParams), 48)
    lib.cpu_tree_mla_plan(ctypes.byref(plan))
    items = room["items"].view(np.int32).reshape(-1, 12)[: int(room["count"].view(np.int32)[0])]
    items[:] = items[np.argsort(items[:, SPLIT] == 0, kind="stable")]  # one block does all: owners behind those that they wait for
    edit(items)
    lib.cpu_tree_mla(ctypes.byref(params), len(batch.cache), ctypes.c_size_t(config.smem_bytes()), int(descending))
    assert not room["arrived"].any()  # ready for the next launch
    return out.astype(np.float32)


def check(batch: Batch, get, config: Config, **options) -> np.ndarray:
    got = run(batch, get, config, **options)
    found = compare(got, batch.reference(), TOLERANCE)
    assert found.ok, str(found)
    return got


CASES = {
    "one root, nothing before": (TINY, make_batch(8, [1], [0])),
    "tree, several splits": (TINY, make_batch(8, [9], [200], seed=1)),
    "tree in bf16 partials": (replace(TINY, float_parts=False), make_batch(8, [5], [150], seed=2)),
    "ragged, one split": (WIDE, make_batch(8, [9, 1, 4], [63, 64, 0], seed=3)),
    "ragged, every tile a split": (FINE, make_batch(4, [3, 9, 1], [0, 128, 65], page=16, seed=4)),
    "64 heads": (WIDE, make_batch(64, [3], [70], page=32, seed=5)),
    "ahead of the values before: a tile": (replace(TINY, ahead=9), make_batch(8, [2, 3], [130, 1], seed=6)),
    "odd heads, odd pages": (TINY, make_batch(5, [7], [95], page=24, seed=7)),
    "tree of more nodes than a word": (WIDE, make_batch(4, [70], [30], page=16, seed=8)),
    "dead rows and empty sequences": (TINY, make_batch(8, [2, 3], [10, 66], seed=9, bucket=8, sequences=4)),
}

HOPPER = Config(octets=1, slots=9)
CASES |= {
    "wgmma: tree, several splits": (HOPPER, make_batch(8, [9], [200], seed=1)),
    "wgmma: ragged, pages of 16": (replace(HOPPER, chunk=1, slots=27), make_batch(4, [3, 9, 1], [0, 128, 65], page=16, seed=4)),
    "ahead: three boxes": (replace(TINY, ahead=3), make_batch(8, [2, 3], [130, 1], seed=6)),
    "wgmma: nine octets, a tile ahead, pages of 48": (Config(octets=9, ahead=9), make_batch(8, [9, 1], [130, 3], page=48, seed=6)),
    "ahead: wgmma, three boxes, a ring of eleven": (Config(octets=3, slots=11, ahead=3), make_batch(8, [9, 1], [330, 3], seed=6)),
    "wgmma: 64 heads, pages of 32": (Config(octets=8, slots=18), make_batch(64, [2], [70], page=32, seed=5)),
    "wgmma: bf16 partials, dead rows": (
        replace(HOPPER, octets=2, float_parts=False, causal=True),
        make_batch(8, [3, 2], [140, 66], seed=9, bucket=8, sequences=4, chain=True),
    ),
}  # fmt: skip

ROWS = Config(octets=8, slots=18, rows=True)
CASES |= {
    "rows: one root, nothing before": (ROWS, make_batch(8, [1], [0])),
    "rows: nine tiles in one split": (replace(ROWS, chunk=9), make_batch(8, [8], [520], seed=1)),
    "rows: 64 heads, bf16 partials": (replace(ROWS, float_parts=False), make_batch(64, [3], [330], seed=2)),
    "rows: ragged, every tile a split, pages of 16": (replace(ROWS, chunk=1), make_batch(16, [3, 9, 1], [0, 128, 65], page=16, seed=4)),
    "rows: odd heads, more nodes than a word": (replace(ROWS, chunk=2), make_batch(5, [70], [30], page=48, seed=8)),
    "rows: causal, dead rows": (
        replace(ROWS, causal=True),
        make_batch(8, [30, 2], [140, 66], seed=9, bucket=40, sequences=4, chain=True),
    ),
    "rows: unlike lengths side by side": (ROWS, make_batch(8, [2, 7, 5], [400, 30, 130], page=32, seed=8)),
}  # fmt: skip


TRIALS = {  # of prim/mla_trials.cuh
    "wgmma: tree, several splits": ("EARLY_KEYS", "MERGE_LATER", "MERGERS"),
    "wgmma: bf16 partials, dead rows": ("EARLY_KEYS", "MERGE_LATER", "REHEARSED", "EARLY_BOXES"),
    "ahead: wgmma, three boxes, a ring of eleven": ("EARLY_KEYS", "EARLY_BOXES=13"),
    "rows: 64 heads, bf16 partials": ("EARLY_KEYS", "SOFTEN_FIRST"),
    "rows: ragged, every tile a split, pages of 16": ("EARLY_KEYS",),
}


def with_trials(name: str) -> Config:
    named = [trial.partition("=") for trial in TRIALS[name]]
    return replace(CASES[name][0], trials=tuple((trial, int(value or 1)) for trial, _, value in named))


@pytest.mark.parametrize("name", TRIALS)
def test_trials_match_the_definition(shim, name):
    config, batch = CASES[name]
    got = check(batch, shim, with_trials(name), descending=True)
    if "MERGE_LATER" not in TRIALS[name]:  # which sums in another order
        check_bitwise(got, run(batch, shim, config))


OWNED = {  # batch, blocks, OWNERS, pieces of each column tile
    "three helpers and two, half a column tile": (make_batch(32, [3], [900], seed=3), 7, 1, [4, 3]),
    "ragged, nobody helps the last": (make_batch(64, [2, 1], [700, 330], page=16, seed=4, bucket=4, sequences=3), 7, 2, [3, 3, 1]),
}


@pytest.mark.parametrize("parts", [True, False], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", OWNED)
def test_owners_add_what_helpers_hand_over(shim, name, parts):
    batch, blocks, pieces, found = *OWNED[name][:3], []
    config = replace(ROWS, float_parts=parts, trials=(("EARLY_KEYS", 1), ("OWNERS", pieces)))

    def note(items):
        found.extend(abs(int(i[SPLITS])) for i in items[(items[:, TILES] > 0) & (items[:, SPLIT] == 0)])

    got = check(batch, shim, config, blocks=blocks, edit=note)
    assert found == OWNED[name][3]
    check_bitwise(run(batch, shim, config, blocks=blocks, descending=True), got)


def test_mutation_an_owner_that_takes_anothers_part_shows(shim):
    batch, blocks, pieces, _ = OWNED["ragged, nobody helps the last"]
    config = replace(ROWS, trials=(("OWNERS", pieces),))

    def mix_up(items):
        items[(items[:, TILES] > 0) & (items[:, SPLIT] == 0) & (items[:, SLOT] == 2), SLOT] = 0

    assert not compare(run(batch, shim, config, blocks=blocks, edit=mix_up), batch.reference(), TOLERANCE).ok


@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(shim, name):
    config, batch = CASES[name]
    check(batch, shim, config)


@pytest.mark.parametrize(
    "name", [*(n for n in CASES if n[:4] in ("tree", "rows", "ahea")), "ragged, every tile a split", "wgmma: ragged, pages of 16"]
)
def test_other_order_of_threads(shim, name):
    config, batch = CASES[name]
    check_bitwise(run(batch, shim, config, descending=True), run(batch, shim, config))


@pytest.mark.parametrize(
    "name", ["tree, several splits", "ragged, one split", "wgmma: tree, several splits", "rows: nine tiles in one split"]
)
@pytest.mark.parametrize("descending", [False, True])
def test_the_build_for_racecheck_has_the_same_bits(shim, request, name, descending):
    config, batch = CASES[name]
    want = run(batch, shim, config)
    request.getfixturevalue("every_lane_arrives")
    assert config.defines(8)["EVERY_LANE_ARRIVES"] == 1
    check_bitwise(run(batch, shim, config, descending=descending), want)


@pytest.mark.parametrize("config", [TINY, FINE, WIDE, ROWS], ids=["tiny", "fine", "wide", "rows"])
def test_chains_need_no_ancestor_words(shim, config):
    """The causal build against the definition, with words that say the opposite."""
    batch = make_batch(8, [5, 11], [60, 3], seed=10, chain=True)
    want = batch.reference()
    batch.ancestors[:] = 0
    found = compare(run(batch, shim, replace(config, causal=True)), want, TOLERANCE)
    assert found.ok, str(found)


@pytest.mark.parametrize("config", [TINY, ROWS], ids=["tiny", "rows"])
def test_a_key_of_nan_reaches_its_descendants_alone(shim, config):
    """Committed keys are everybody's; a node's own are for its descendants, whatever they hold."""
    batch = make_batch(8, [9], [70], seed=11)
    sick = 4
    batch.cache[batch.slot[sick]] = np.nan
    got, want = run(batch, shim, config), batch.reference()
    below = (batch.ancestors[:, 0] >> np.uint64(sick) & np.uint64(1)).astype(bool)
    assert 0 < below.sum() < 9
    assert np.isnan(got[below]).all()
    healthy = make_batch(8, [9], [70], seed=11)
    check_bitwise(got[~below], run(healthy, shim, config)[~below])
    assert compare(got[~below], want[~below], TOLERANCE).ok


@pytest.mark.parametrize(
    "config",
    [FINE, replace(TINY, chunk=2), replace(TINY, chunk=100), replace(ROWS, chunk=2)],
    ids=["fine", "two", "unsplit", "rows"],
)
def test_a_row_alone_equals_the_row_in_company(shim, config):
    """With a given chunk a row's bits depend on its own keys: not on the bucket, its place in it, the blocks or the other rows."""
    both = make_batch(8, [1, 9, 4], [130, 70, 0], seed=12)
    together = run(both, shim, config)
    check_bitwise(run(both, shim, config, blocks=132), together)
    for b, rows in enumerate([slice(0, 1), slice(1, 10), slice(10, 14)]):
        check_bitwise(run(part_of(both, b, rows), shim, config), together[rows], f"sequence {b} alone")
    first = slice(1, 2)  # the root sees no node: without its tree it is plain decoding
    check_bitwise(run(part_of(both, 1, first), shim, config), together[first], "root alone")


@pytest.mark.parametrize("config", [FINE, replace(ROWS, chunk=1)], ids=["fine", "rows"])
def test_a_chain_equals_decoding_token_by_token(shim, config):
    """A row of a chain has the bits of the same token decoded alone, when those before it are committed."""
    chain = make_batch(8, [6], [125], seed=13, chain=True)
    together = run(chain, shim, config)
    for i in range(6):
        alone = part_of(chain, 0, slice(i, i + 1))
        alone.ctx[:] = 125 + i
        alone.ancestors[:] = 1
        check_bitwise(run(alone, shim, config), together[i : i + 1], f"row {i}")


def test_wider_tiles_give_the_same_bits(shim):
    batch = make_batch(8, [9], [200], seed=14)
    check_bitwise(run(batch, shim, FINE), run(batch, shim, replace(WIDE, chunk=1)))


@pytest.mark.parametrize("fault", ["ancestor dropped", "ancestor added", "page", "length", "rope", "value", "row0"])
@pytest.mark.parametrize("config", [TINY, ROWS], ids=["tiny", "rows"])
def test_a_fault_shows(shim, fault, config):
    batch = make_batch(8, [9], [70], seed=15, bucket=10)
    want = batch.reference()
    if fault == "ancestor dropped":
        batch.ancestors[8, 0] &= ~np.uint64(1)  # the root, which every node sees
    elif fault == "ancestor added":
        hidden = next(j for j in range(7, 0, -1) if not batch.ancestors[8, 0] >> np.uint64(j) & np.uint64(1))
        batch.ancestors[8, 0] |= np.uint64(1) << np.uint64(hidden)
    elif fault == "page":
        batch.pages[0, :2] = batch.pages[0, 1::-1].copy()
    elif fault == "length":
        batch.ctx[0] -= 1
    elif fault == "rope":
        batch.cache[batch.slot[0], 512:] = -batch.cache[batch.slot[0], 512:]
    elif fault == "value":
        batch.cache[batch.slot[0], :512] = np.roll(batch.cache[batch.slot[0], :512], 1)
    else:
        batch.row0[0] = 1
    assert not compare(run(batch, shim, config), want, TOLERANCE).ok


def part_of(batch: Batch, b: int, rows: slice) -> Batch:
    """Some rows of one sequence, the first of them as node 0."""
    n = rows.stop - rows.start
    return Batch(
        replace(batch.dims, M=n, B=1), batch.q[rows].copy(), batch.cache, batch.pages[b : b + 1], batch.ctx[b : b + 1].copy(),
        np.zeros(1, np.int32), np.zeros(n, np.int32), batch.pos[rows], batch.slot[rows], batch.ancestors[rows].copy(),
    )  # fmt: skip


def test_mutation_balanced_splits_follow_the_load(shim):
    """Without a given chunk the splits, and with them the last bits, follow the number of blocks: the bit tests above can fail."""
    batch = make_batch(8, [9], [300], seed=12)
    few, many = run(batch, shim, TINY, blocks=1), run(batch, shim, TINY, blocks=132)
    assert compare(few, many, TOLERANCE).ok and not np.array_equal(few, many)
