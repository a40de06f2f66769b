"""The attention kernel's configurations: what fits, what compiles where, what it is predicted to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.hw import HARDWARE
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.tree_mla import entries
from runtime.kernels_cu.tree_mla_config import (
    Config,
    Dims,
    candidates,
    choose_chunk,
    default_config,
    most_tiles,
    part_length,
    predict_us,
    served,
    work,
)

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
H200 = HARDWARE["h200"]
TREES = Dims(M=90, B=10, heads=8, keys=4105)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))


@needs_nvrtc
@pytest.mark.parametrize(("arch", "causal"), [*((arch, False) for arch in ARCHITECTURES), ("sm_90a", True)])  # 10 s each
def test_widest_and_narrowest_compile_without_spills(arch, causal):
    found = list(candidates(TREES, arch, causal))
    for one in (found[0], [c for c in found if not c.rows][-1], *(c for c in found if c.rows and c.float_parts)):
        config = served(one, TREES)
        built = build(config.source, config.defines(8), arch).entries
        assert set(built) == set(entries(config)) and built["tree_mla"].registers * config.threads <= 65536


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("heads", [5, 8])
def test_every_candidate_compiles_without_spills(arch, heads):
    for config in candidates(replace(TREES, heads=heads), arch):
        for dims in (TREES, replace(TREES, M=900)):
            build(config.source, served(config, dims).defines(heads), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_candidates_are_legal_and_cover_every_page_size(arch):
    for page in (16, 24, 32, 48, 64, 128):
        dims = replace(TREES, page_size=page)
        found = list(candidates(dims, arch))
        assert found and all(c.wgmma == (arch == "sm_90a" and page != 24) for c in found)
        for config in found:
            config.check(dims, arch)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"octets": 10}, "octets"),
        ({"slots": 8}, "slots"),
        ({"ahead": 10}, "boxes ahead"),
        ({"slots": 16, "ahead": 9}, "17"),
        ({"octets": 9, "slots": 18}, "shared memory"),
        ({"producers": 2}, "one producer"),
        ({"wgmma": False, "octets": 6, "slots": 9}, "mma.sync"),
        ({"chunk": 1}, "splits"),
        ({"octets": 9, "heads": 12}, "multiple of 8"),
        ({"rows": True}, "18 slots"),
        ({"rows": True, "slots": 18, "wgmma": False}, "wgmma"),
        ({"trials": (("EARLY_KEY", 1),)}, "EARLY_KEY is no trial"),
        ({"trials": (("EARLY_KEYS", 1),), "wgmma": False, "octets": 1, "slots": 9}, "with wgmma"),
        ({"trials": (("MERGE_LATER", 1),)}, "up to 4 octets"),
        ({"trials": (("OWNERS", 2),)}, "queries as rows"),
        ({"trials": (("READY_FIRST", 1),)}, "queries as rows"),
    ],
)
def test_a_broken_rule_is_named(change, rule):
    change = dict(change)
    dims = replace(TREES, keys=262144, heads=change.pop("heads", 8))
    Config().check(dims)
    with pytest.raises(ValueError, match=rule):
        replace(Config(), **change).check(dims)


@pytest.mark.parametrize("name", ["heads", "M", "B", "page_size", "keys"])
def test_dims_out_of_range_are_named(name):
    with pytest.raises(ValueError, match=name):
        replace(TREES, **{name: 0}).check()


def test_splits_fill_the_device_once():
    """Ten streams of 4k keys and a tile each: 13 splits, 130 blocks; one split more would need a second wave."""
    w = work(Dims(90, 10, 8, 4105), Config(octets=9))
    assert (w.waves, w.splits, w.tiles_each) == (1, 13, 5)
    chunk = choose_chunk(1, 10, 1025, 132, 528)
    assert chunk == 79
    assert choose_chunk(400, 1, 10, 132, 528) == 10  # more tiles than blocks and short: no split


def test_parts_are_even_where_ranges_are_not():
    """Nine column tiles of ten streams: 14 parts of 49 key tiles on 126 blocks; equal ranges would take three waves of 17."""
    assert part_length(9, 10, 65, 132) == 49
    assert choose_chunk(9, 10, 65, 132, 528) == 17
    assert work(Dims(90, 10, 64, 4105), Config(slots=18, rows=True)).tiles_each == 49
    assert part_length(133, 1, 65, 132) == 0


def test_worst_case_tiles_hold_any_batch():
    config = Config(octets=1)
    dims = replace(TREES, heads=5)
    for rows in ([1] * 10, [81] + [1] * 9, [9] * 10, [40, 50]):
        assert sum(-(-n * 5 // 8) for n in rows) <= most_tiles(dims, config)
    for heads in (5, 8, 12, 64):
        alone = replace(dims, heads=heads, B=90)
        assert 90 * -(-heads // 8) == most_tiles(alone, config), "every row a sequence"


COLUMNS, EXACT = Config(ahead=9, float_parts=False), Config(ahead=9)
AS_ROWS = Config(8, 18, rows=True)
# One H200, us: heads, q, streams, context; the configuration.
MEASURED = [
    (8, 9, 1, 4096, replace(COLUMNS, octets=3, slots=24), 12.9), (8, 1, 10, 4096, replace(COLUMNS, octets=1, slots=27), 20.6),
    (8, 9, 10, 4096, replace(COLUMNS, octets=9), 30.5), (8, 9, 10, 4096, replace(COLUMNS, octets=5, slots=22, ahead=0), 36.7),
    (8, 9, 10, 4096, replace(AS_ROWS, float_parts=False), 35.8), (8, 9, 10, 65536, replace(EXACT, octets=9), 262.0),
    (8, 9, 10, 65536, replace(AS_ROWS, float_parts=False), 375.9), (8, 33, 10, 65536, AS_ROWS, 857.5),
    (8, 33, 10, 65536, replace(EXACT, octets=7, slots=19), 896.0), (32, 9, 10, 4096, replace(AS_ROWS, float_parts=False), 70.3),
    (64, 9, 10, 4096, replace(AS_ROWS, float_parts=False), 116.6), (64, 33, 10, 65536, AS_ROWS, 5318.7),
    (64, 33, 10, 65536, replace(EXACT, octets=8, slots=18), 5662.3),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "q", "streams", "ctx", "config", "us"), MEASURED)
def test_prediction_is_near_the_measurement(heads, q, streams, ctx, config, us):
    predicted = predict_us(Dims(q * streams, streams, heads, ctx + q), config, H200)
    assert 0.85 * us < predicted < 1.15 * us, predicted


@pytest.mark.parametrize(
    ("heads", "q", "streams", "ctx", "octets", "rows"),
    [
        (8, 9, 1, 4096, 3, False), (8, 1, 10, 4096, 1, False), (8, 9, 10, 4096, 9, False), (8, 9, 10, 65536, 9, False),
        (8, 33, 10, 65536, 8, True), (32, 9, 10, 4096, 8, True), (64, 9, 10, 4096, 8, True), (64, 33, 10, 65536, 8, True),
    ],
)  # fmt: skip
def test_default_is_what_was_measured_best(heads, q, streams, ctx, octets, rows):
    found = default_config(Dims(q * streams, streams, heads, ctx + q))
    assert (found.octets, found.rows) == (octets, rows)


def test_many_columns_are_rows():
    assert default_config(Dims(330, 10, 64, 65569)).rows
    assert not default_config(Dims(10, 10, 8, 65537)).rows


def test_default_is_a_candidate_of_one_tile_for_nine_nodes():
    assert default_config(TREES).octets == 9
    assert not default_config(TREES, "sm_120a").wgmma
