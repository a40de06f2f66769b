"""Streaming products on the CPU shim: kernels_np in bfloat16, cut tiles, heads and strides, dead rows, equal bits at every M, faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from runtime.hw import HARDWARE
from runtime.kernels_cu import linear_stream
from runtime.kernels_cu._build import build, nvrtc_version
from runtime.kernels_cu.linear_skinny import Dims
from runtime.kernels_cu.linear_stream import AT_ONCE, Config, candidates, hand_overs, workspace_bytes
from runtime.ops import OPS
from tests.mutants import mutant
from tests.runtime.kernels_cu.linear_cases import check_absorbing, check_product, check_row_bits, check_values
from tests.shim_calls import address, bf16, poisoned, random_bf16, run_call
from tests.shim_device import shim_map

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
H200 = HARDWARE["h200"]


def run(get, config: Config, dims: Dims, w, x, out, seq=None, times: int = 1) -> None:
    """Several times over the same workspace if asked: the cells must be as they were."""
    room = {name: np.zeros(size, np.uint8) for name, size in workspace_bytes(dims, config).items()}
    at = {n: address(a) for n, a in (room | {"w": w, "x": x, "out": out, "seq": seq}).items()}
    for _ in range(times):
        call = linear_stream.call(config, dims, at, out.dtype == np.float32, shim_map)
        run_call(get(config.source.replace(".cu", "_entry.cu"), config.defines()), call)
    assert not room["sums"].any()


def check(get, rng, config: Config, m: int, n: int, k: int, kind=bf16) -> None:
    check_product(partial(run, get), rng, config, m, n, k, kind)


SHAPES = [
    (Config(8, 1, 1, 2, 1), 1, 64, 64),  # one box
    (Config(8, 1, 1, 3, 3), 8, 128, 320),  # blocks of three or four boxes, two tiles of five
    (Config(16, 2, 1, 2, 5), 16, 200, 448),  # a tile that hangs over, each cut
    (Config(16, 1, 2, 2, 7), 9, 130, 320),  # blocks of one or two boxes, several sums a tile
    (Config(16, 2, 2, 4, 2), 11, 250, 192),
    (Config(8, 1, 1, 2, 2), 5, 256, 128),  # whole tiles
    (Config(48, 1, 1, 2, 3), 41, 72, 256),
    (Config(24, 1, 2, 2, 3), 17, 256, 320),
    (Config(64, 2, 1, 2, 3), 64, 256, 320),
    (Config(16, 1, 1, 2, 16, early=3, ahead=2), 16, 128, 1024),  # eight blocks a tile
    (Config(8, 1, 1, 2, 3, early=AT_ONCE, ahead=40), 3, 192, 1024),  # more ahead than there is
    (Config(8, 1, 1, 3, 3, ahead=-2), 3, 192, 1024),  # most of the ring after the wait
]


CARRIED = [
    (Config(8, 1, 1, 3, 3, AT_ONCE, carried=True), 8, 128, 320),
    (Config(16, 2, 1, 2, 5, carried=True, kept=True), 16, 200, 448),
    (Config(16, 1, 2, 2, 7, 2, carried=True), 9, 130, 320),
    (Config(16, 2, 2, 4, 2, carried=True), 11, 250, 192),
    (Config(24, 1, 2, 2, 3, kept=True), 17, 256, 320),
]


@pytest.mark.parametrize(("config", "m", "n", "k"), SHAPES + CARRIED)
def test_is_the_definition(shim, rng, config, m, n, k):
    """Blocks one after the other, in ascending order: none waits for a higher number, or its sum would be NaN here."""
    check(shim, rng, config, m, n, k)
    check(shim, rng, config, m, n, k, np.float32)


def test_a_row_has_the_same_bits_at_every_m(shim, rng):
    check_row_bits(partial(run, shim), rng, Config(16, 1, 1, 2, 4), Config(8, 1, 1, 3, 4), 192)
    check_row_bits(partial(run, shim), rng, Config(16, 1, 1, 2, 4), Config(8, 1, 1, 3, 4, carried=True), 192)


def test_absorbing_the_keys(shim, rng):
    for carried in (False, True):
        check_absorbing(partial(run, shim), rng, Config(8, 1, 1, 2, 2, carried=carried))


def test_values_of_heads(shim, rng):
    for carried in (False, True):
        check_values(partial(run, shim), rng, Config(16, 1, 1, 2, 4, carried=carried), 128, 64)


FAULTS = {
    "x of another box": ("head * p.x_head + column}", "0}"),
    "the second 64 rows lost": ("a + 512 * t + 2 * k", "a + 2 * k"),
    "the second group's rows lost": ("+ group * TALL * 8192", ""),
    "a neighbour's sum lost": ("product.take(block_of(p, begin))", "product.take(block_of(p, begin) + 1)"),
    "a cell left full": ("store_cell(cells_of(block - i) + (u0 + u) * 4 * kMultiply, uint4{0, 0, 0, 0});", ""),
    "a sum in another block's place": ("(size_t)block * kSum", "(size_t)(block / 2) * kSum"),
    "boxes from the first on": ("box = share.to - 1 - n, tile = box / p.steps, h", "box = share.from + n, tile = box / p.steps, h"),
    "rows eight apart changed about": ("sum[t][n][2 * eight + e]", "sum[t][n][2 - 2 * eight + e]"),
    "a dead row": ("!(p.seq && p.seq[m] < 0)", "true"),
    "the last rows": ("if (row + below >= p.N) continue;", "if (row + below >= p.N - 8) continue;"),
    "blocks that overlap": ("(block < p.more ? block : p.more)", "0"),
}  # fmt: skip


CARRIED_FAULTS = {
    "x of the first head": ("tile / p.tiles * p.x_head + (box", "(box"),
    "the last row lost": ("i < 8 * p.M; i += 32", "i < 8 * p.M - 8; i += 32"),
    "pieces where they lie in memory": ("in_box(i / 8, i % 8)", "16 * i"),
    "rows of the first one's length": ("i / 8 * rows.bytes", "i / 8 * 2 * 64 * p.steps"),
    "weights of another box": ("return {(box - tile * p.steps) * 64, ", "return {0, "),
    "the first weights twice": ("ask(box, next);", "ask(box, place_of(lane));"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CARRIED_FAULTS)
def test_a_fault_in_what_carries_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, linear_stream.CARRIED_SOURCE, *CARRIED_FAULTS[fault])
    with pytest.raises(AssertionError):
        check_values(partial(run, get), rng, Config(16, 1, 1, 2, 2, carried=True), 128, 64)


def check_spare_columns(get, rng) -> None:
    """What the first block of a cut tile sends of columns that hold no row."""
    config, dims = Config(8, 1, 1, 2, 2, carried=True), Dims.plain(3, 64, 256)
    x, w, sums = random_bf16(rng, 3, 256), random_bf16(rng, 64, 256), np.zeros((2, 128, 4), np.float32)
    at = {"x": address(x), "w": address(w), "sums": address(sums), "out": address(poisoned(3, 64)), "seq": 0}
    call = linear_stream.call(config, dims, at, describe=shim_map)
    run_call(get("linear_carried_entry.cu", config.defines()), replace(call, grid=(1, 1, 1)))
    spare = 2 * (np.arange(128) % 4)[:, None] + np.arange(4) % 2 >= 3
    assert (sums[0][spare] == 0).all() and (sums[0][~spare] != 0).all()


def test_rows_that_are_not_there_are_zeros(shim, rng, tmp_path):
    check_spare_columns(shim, rng)
    get = mutant(tmp_path, linear_stream.CARRIED_SOURCE, "kWeights + 16 * i, uint4{0, 0, 0, 0}", "kWeights + 16 * i, uint4{~0u, 0, 0, 0}")
    with pytest.raises(AssertionError):
        check_spare_columns(get, rng)


def check_zeros(get) -> None:
    """A sum of zero is a sum, too: of tiles that two and more blocks share."""
    w, out = random_bf16(np.random.default_rng(0), 192, 320), poisoned(3, 192, dtype=np.float32)
    run(get, Config(8, 1, 1, 2, 7), Dims.plain(3, 192, 320), w, np.zeros((3, 320), bf16), out, times=2)
    assert (out == 0).all()


def test_sums_of_zero_arrive(shim, tmp_path):
    check_zeros(shim)
    with pytest.raises(AssertionError):
        check_zeros(mutant(tmp_path, "prim/across.cuh", "return bits ? bits : 0x80000000u;", "return bits;"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, linear_stream.SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check(get, rng, Config(16, 2, 2, 2, 5), 12, 1000, 256)


def test_what_the_kernel_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"at least M = 17"):
        Config(16).check(Dims.plain(17, 64, 64))
    with pytest.raises(ValueError, match=r"K = 96 is not a positive multiple of 64"):
        Config(16).check(Dims.plain(1, 64, 96))
    with pytest.raises(ValueError, match=r"320 weight rows a box, at most 256"):
        Config(16, 5).check(Dims.plain(1, 64, 64))
    with pytest.raises(ValueError, match=r"bytes of shared memory, 232448 fit"):
        Config(16, 4, 1, 8).check(Dims.plain(1, 64, 64))
    with pytest.raises(ValueError, match=r"built for sm_90a, not for sm_89"):
        Config(16).check(Dims.plain(1, 64, 64), "sm_89")
    with pytest.raises(ValueError, match=r"of M = 17 rows 16 can be carried"):
        Config(24, carried=True).check(Dims.plain(17, 64, 64))
    with pytest.raises(ValueError, match=r"ahead must be 0"):
        Config(16, carried=True, ahead=1).check(Dims.plain(1, 64, 64))


KIMI = [(2112, 7168), (12_288, 1536), (7168, 8192), (4096, 7168), (7168, 2048), (384, 7168), (20_480, 7168), (7168, 18_432)]


def test_every_kimi_product_has_a_configuration():
    """The same for every M but for columns and slots."""
    for n, k in KIMI:
        chosen = linear_stream.default_config(Dims.plain(16, n, k), H200)
        times = [linear_stream.predict_us(Dims.plain(16, n, k), c, H200) for c in candidates(Dims.plain(16, n, k))]
        assert min(times) >= OPS["linear"].cost({"M": 16, "N": n, "K": k}).floor_us(H200)
        for m in (1, 8, 16, 24, 64):
            config = linear_stream.default_config(Dims.plain(m, n, k), H200)
            config.check(Dims.plain(m, n, k))
            assert replace(config, columns=16, slots=chosen.slots) == chosen
    assert not candidates(Dims.plain(1, 64, 64), "sm_89")


def test_handing_over_costs_no_build_and_changes_no_bits():
    """All that differs is told at run time and has no part in which block multiplies what."""
    dims = Dims.plain(16, 7168, 7168)
    for config in candidates(dims):
        found = hand_overs(config)
        assert len(set(found)) == len(found) > (3 if config.carried else 4)
        assert {replace(c, early=0, ahead=0) for c in found} == {replace(config, early=0, ahead=0)}
        assert all(c.fits(dims) and c.defines() == config.defines() for c in found)


def test_some_candidates_leave_room_for_the_next_launch():
    """Of every width, for every product: shared memory and registers of both launches' blocks."""
    for n, k in KIMI:
        found = candidates(Dims.plain(16, n, k))
        assert {c.rows for c in found if c.overlaps(Dims.plain(16, n, k))} >= {64, 128, 256}
        assert not all(c.overlaps(Dims.plain(16, n, k)) for c in found)
    assert not Config(16, 2, 1, 12).overlaps(dims := Dims.plain(16, 7168, 7168))
    assert Config(16, 2, 1, 6).overlaps(dims) and not Config(16, 2, 1, 6, 264).overlaps(dims)
    assert not Config(64, 2, 2, 2).overlaps(Dims.plain(64, 7168, 7168))


def test_x_is_carried_to_sixteen_rows_and_by_no_prediction():
    for n, k in KIMI:
        assert {c.carried for c in candidates(Dims.plain(16, n, k))} == {False, True}
        assert not any(c.carried for c in candidates(Dims.plain(17, n, k)))
        assert not linear_stream.default_config(Dims.plain(1, n, k), H200).carried
    config = Config(16, 2, 1, 12, 112, AT_ONCE, carried=True, kept=True)
    for m in (1, 16, 17, 64):
        wide = linear_stream.widened(config, m)
        wide.check(Dims.plain(m, 7168, 7168))
        assert (wide.carried, wide.kept, wide.source) == (m <= 16, True, "linear_carried.cu")


def test_a_carried_row_is_predicted_to_cost_what_it_holds():
    """The square as it is served."""
    served = Config(16, 2, 1, 12, 112, AT_ONCE)
    for m, least in ((1, 0.9), (8, 0.3), (16, 0.3)):
        dims, plain = Dims.plain(m, 7168, 7168), linear_stream.widened(served, m)
        carried = replace(plain, carried=True)
        saved = linear_stream.predict_us(dims, plain, H200) - linear_stream.predict_us(dims, carried, H200)
        assert least <= saved <= 1.2
        read = [linear_stream.work(dims, c).read_bytes for c in (plain, carried)]
        assert read[0] - read[1] == 2 * (plain.columns - m) * 7168 * 56


@needs_nvrtc
def test_kept_weights_are_asked_for_otherwise(tmp_path, monkeypatch):
    """Under the shim no copy has a hint; in machine code it stands."""
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    kept = Config(16, 2, 1, 12, 112, AT_ONCE, kept=True).defines()
    codes = {build(linear_stream.CARRIED_SOURCE, kept | {"KEPT": way}, linear_stream.ARCH).code for way in (0, 1)}
    assert len(codes) == 2


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 16, 64])
def test_compiles_without_stack_or_spills(tmp_path, monkeypatch, m):
    """Two blocks of an SM's 65,536 registers."""
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    for config in {replace(linear_stream.widened(c, m), slots=3, blocks=1) for c in candidates(Dims.plain(16, 7168, 7168))}:
        entries = build(config.source, config.defines(), linear_stream.ARCH).entries
        assert set(entries) == {*linear_stream.ENTRIES, *config.entries}
        fours = config.tall * config.columns // 8
        blocks = 1 if fours > 4 or (config.groups > 2 and fours > 2) else 2
        assert max(e.registers for e in entries.values()) * config.threads * blocks <= 65_536
