"""The attention kernel's list of items, on the CPU shim: every key of every column tile once, splits that find one another, balance."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from runtime.kernels_cu.tree_mla import fill_params, workspace_bytes
from runtime.kernels_cu.tree_mla_config import ITEM_OVERHEAD, TILE, Config, Dims, slot_room, work

FIELDS = ("first", "columns", "packed", "seq", "ctx", "tile0", "tiles", "split", "splits", "slot", "stride", "counter")
ROWS = Config(octets=8, slots=18, rows=True)
NARROW = Config(octets=1, slots=17, producers=2, wgmma=False)
OWNED = replace(ROWS, trials=(("OWNERS", 2),))


def items_of(get, config: Config, heads: int, rows: list[int], ctx: list[int], blocks: int, bucket: int = 0) -> list[dict[str, int]]:
    """The plan of sequences with that many rows and committed keys, holes included; the list starts as 0xFF."""
    m, longest = max(bucket, sum(rows)), max(r + c for r, c in zip(rows, ctx, strict=True))
    dims = Dims(m, len(rows), heads, longest)
    room = {
        name: np.full(size, 0xFF, np.uint8) for name, size in workspace_bytes(dims, config, blocks).items() if name in ("items", "count")
    }
    seq = np.full(m, -1, np.int32)
    seq[: sum(rows)] = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
    arrays = room | {"ctx": np.array(ctx, np.int32), "row0": np.cumsum([0, *rows[:-1]]).astype(np.int32), "seq": seq}
    at = {name: a.ctypes.data for name, a in arrays.items()}
    at |= dict.fromkeys(("q", "cache", "pages", "ancestors", "out", "part", "stats", "arrived"), 0)
    plan, _ = fill_params(dims, config, at, 1.0, blocks)
    get("mla_entry.cu", config.defines(heads)).cpu_tree_mla_plan(ctypes.byref(plan))
    count = int(room["count"].view(np.int32)[0])
    return [dict(zip(FIELDS, (int(x) for x in item), strict=True)) for item in room["items"].view(np.int32).reshape(-1, 12)[:count]]


def check_items(items: list[dict[str, int]], config: Config, heads: int, rows: list[int], ctx: list[int], room: int) -> None:
    live = [i for i in items if i["tiles"]]
    row0 = np.cumsum([0, *rows[:-1]])
    slots, counters, found = set(), set(), 0
    for b, (n, c) in enumerate(zip(rows, ctx, strict=True)):
        for packed in range(0, n * heads, config.columns):
            mine = sorted((i for i in live if i["seq"] == b and i["packed"] == packed), key=lambda i: i["tile0"])
            columns = min(config.columns, n * heads - packed)
            keys = -(-(c + (packed + columns - 1) // heads + 1) // TILE)
            assert [i["tile0"] for i in mine] == [0, *np.cumsum([i["tiles"] for i in mine])[:-1]]
            assert sum(i["tiles"] for i in mine) == keys
            assert [i["split"] for i in mine] == list(range(len(mine)))
            owned = mine[0]["splits"] < 0  # the first piece's block has its sums in registers, which take no slot
            assert {(i["splits"], i["first"], i["columns"], i["ctx"]) for i in mine} == {
                (-len(mine) if owned else len(mine), int(row0[b]) * heads + packed, columns, c)
            }
            (counter,) = {i["counter"] for i in mine}
            assert counter not in counters
            counters.add(counter)
            for i in mine[owned:] if len(mine) > 1 else ():
                slot = i["slot"] + (i["split"] - owned) * i["stride"]
                assert 0 <= slot < room and slot not in slots
                slots.add(slot)
            found += len(mine)
    assert found == len(live)


@pytest.mark.parametrize("config", [ROWS, NARROW, OWNED], ids=["rows", "narrow", "owned"])
@pytest.mark.parametrize("seed", range(12))
def test_every_key_of_every_tile_is_listed_once(shim, config, seed):
    rng = np.random.default_rng(seed)
    heads = 8
    rows = [int(x) for x in rng.integers(0, (40, 3, 200)[seed % 3], int(rng.integers(1, 24)))] + [1]
    ctx = [int(x) for x in rng.integers(0, (70, 5000, 100000)[seed // 3 % 3], len(rows))]
    blocks = (132, 7, 148, 1)[seed % 4]
    items = items_of(shim, config, heads, rows, ctx, blocks, bucket=sum(rows) + seed)
    dims = Dims(sum(rows) + seed, len(rows), heads, 1)
    check_items(items, config, heads, rows, ctx, slot_room(dims, config, blocks))


@pytest.mark.parametrize(
    ("heads", "streams", "q", "ctx"), [(64, 10, 9, 4096), (64, 10, 33, 65536), (32, 10, 9, 4096), (8, 10, 33, 65536), (8, 10, 9, 65536)]
)
def test_blocks_end_together(shim, heads, streams, q, ctx):
    """No block has more than 1.06 of the mean, an item counted as ITEM_OVERHEAD tiles more than it has; the model knows the length."""
    items = items_of(shim, ROWS, heads, [q] * streams, [ctx] * streams, 132)
    check_items(items, ROWS, heads, [q] * streams, [ctx] * streams, slot_room(Dims(q * streams, streams, heads, ctx + q), ROWS, 132))
    load = np.array([sum(i["tiles"] + ITEM_OVERHEAD for i in items[block::132] if i["tiles"]) for block in range(132)])
    w = work(Dims(q * streams, streams, heads, ctx + q), ROWS)
    assert load.max() <= 1.06 * load.sum() / 132 + ITEM_OVERHEAD
    walked = max(sum(i["tiles"] for i in items[block::132] if i["tiles"]) for block in range(132))
    assert abs(walked - w.tiles_each) <= 2 * ITEM_OVERHEAD, (walked, w)


@pytest.mark.parametrize(("heads", "most"), [(64, 47), (32, 27)])
def test_owners_wait_for_nobody_for_long(shim, heads, most):
    """64 heads x 10 streams x 9 nodes x 4k: 90 owners of 47 key tiles, 42 helpers that are through before; parts are 49."""
    items = items_of(shim, OWNED, heads, [9] * 10, [4096] * 10, 132)
    check_items(items, OWNED, heads, [9] * 10, [4096] * 10, slot_room(Dims(90, 10, heads, 4105), OWNED, 132))
    owners = {i["counter"]: block % 132 for block, i in enumerate(items) if i["tiles"] and not i["split"]}
    assert len(owners) == len(set(owners.values())) == -(-9 * heads // 64) * 10
    assert max(i["tiles"] for i in items if i["tiles"] and not i["split"]) == most
    for block in set(range(132)) - set(owners.values()):
        mine = [i for i in items[block::132] if i["tiles"]]
        assert all(i["split"] for i in mine) and sum(i["tiles"] + 2 for i in mine) <= most + 2
    assert 2 <= max(-i["splits"] for i in items if i["tiles"]) <= 4


def test_helpers_of_too_many_pieces_are_not_asked(shim):
    """108 column tiles leave 24 helpers, five pieces each and more: the list has no room, so ranges or parts are taken."""
    items = items_of(shim, OWNED, 64, [9] * 12, [2000] * 12, 132)
    check_items(items, OWNED, 64, [9] * 12, [2000] * 12, slot_room(Dims(108, 12, 64, 2009), OWNED, 132))
    assert all(i["splits"] >= 1 for i in items if i["tiles"])


def test_mutation_a_key_left_out_shows(shim):
    items = items_of(shim, ROWS, 8, [9, 9], [4000, 300], 132)
    check_items(items, ROWS, 8, [9, 9], [4000, 300], 528)
    next(i for i in items if i["tiles"] > 1)["tiles"] -= 1
    with pytest.raises(AssertionError):
        check_items(items, ROWS, 8, [9, 9], [4000, 300], 528)
