"""Rows of draft trees on the CPU shim have the bits of plain decoding: attention over private pages, layers that share them, faults."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from runtime.kernels_cu import record_attention
from runtime.kernels_cu import tree_mla as family
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.tree_mla_config import WIDTH, Config
from runtime.kernels_cu.tree_paths import SOURCE, PathPages, check_plan
from tests.compare import check_bitwise
from tests.mutants import mutant
from tests.plans import make_plan, page_table
from tests.runtime.kernels_cu.path_cases import LAYERS, TREES, random_world, world_of
from tests.shim_device import ShimDevice

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")


@pytest.fixture
def fine(monkeypatch):
    """Every tile of keys is a range of its own."""
    monkeypatch.setattr(record_attention, "_LEAST_TILES", 1)


@pytest.mark.parametrize("name", TREES)
def test_a_trees_rows_have_the_bits_of_plain_decoding(shim, name):
    """Every row, in both layers, beside chains and dead rows."""
    world_of(ShimDevice(shim), name).check()


def test_ranges_of_a_tile_and_a_row_alone(shim, fine):
    """Decoded in a bucket of one, as plain decoding is."""
    world = world_of(ShimDevice(shim), "a tile begins inside the path", seed=1)
    world.check()
    together = world.attend(world.plan)
    for row in (3, 10, 20):
        check_bitwise(world.plain(slice(row, row + 1)), together[:, row : row + 1], f"row {row}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("page", [16, 32, 64])
def test_random_trees(shim, page, seed):
    random_world(ShimDevice(shim), page, seed).check()


class Hopper(ShimDevice):
    """A shim whose attention is built for wgmma and the copy engine."""

    arch = "sm_90a"

    def functions(self, source, defines, entries):
        if not source.startswith("tree_mla"):
            return super().functions(source, defines, entries)
        library = self._get("mla_entry.cu", dict(defines))
        return {name: getattr(library, f"run_{name}") for name in entries}


class Map(ctypes.Structure):
    """The shim's TensorMap."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("rows", "box_rows", "columns", "row_bytes"))]


@pytest.mark.slow
@pytest.mark.parametrize("config", [Config(octets=1, slots=27, ahead=9), Config(octets=8, slots=18, rows=True)], ids=["columns", "rows"])
@pytest.mark.parametrize("name", TREES)
def test_on_hopper(shim, fine, monkeypatch, config, name):
    """Private pages lie behind the last layer and still within what the copy engine's map of a layer reaches."""
    monkeypatch.setattr(family, "tensor_map", lambda at, rows, columns, row_bytes, box: Map(at, rows, box, columns, row_bytes))
    monkeypatch.setattr(record_attention, "default_config", lambda dims, arch, hw, chunk: replace(config, chunk=chunk))
    world_of(Hopper(shim), name).check()


def test_a_chain_costs_no_copy(shim):
    """Rows that see all before them stay one sequence: no key is copied for them, and the root and its first line need none."""
    world = world_of(ShimDevice(shim), "a page begins inside the path")
    world.attend(world.plan)
    plan, rows = world.plan, world.plan.m + 3
    address, _ = world.ops.arena.held["tree_paths.keys"]
    keys = world.ops.host(DeviceArray(address, (rows,), "i32"))[: plan.m]
    depth = plan.pos - plan.ctx[plan.seq]
    chain = depth == np.arange(plan.m) - plan.row0[plan.seq]
    np.testing.assert_array_equal(keys, np.where(chain, 0, plan.ctx[plan.seq] % 16 + depth + 1))
    assert 5 < chain.sum() < plan.m - 5
    entries = [one.run.call.entry for one in world.launches]
    assert entries == ["path_plan", "tree_mla_plan", *["path_copy", "tree_mla"] * LAYERS]


def test_mutation_keys_at_node_positions_have_other_bits(shim, fine):
    world = world_of(ShimDevice(shim), "a tile begins inside the path")
    world.ops.paths = None
    with pytest.raises(AssertionError, match="differ"):
        check_bitwise(world.attend(world.plan), world.plain())


FAULTS = {
    "two keys swapped": (
        "source[k] = pages[shared] * p.page_size + k;",
        "source[k] = pages[shared] * p.page_size + (k == 2 || k == 5 ? 7 - k : k);",
    ),
    "the path backwards": ("before + seen_before(bits, j), at", "before + depth - seen_before(bits, j), at"),
    "the row's own key left out": ("j <= node; j +=", "j < node; j +="),
    "two rows share pages": ("p.first + row * each", "p.first + (row & ~1) * each"),
    "pages of another layer": ("/ p.page_size + e] = page + e;", "/ p.page_size + e] = page + e - p.first + (1 << 4);"),
    "trees taken for chains": ("const bool chain = depth == node;", "const bool chain = depth <= node;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(shim, fine, tmp_path, fault):
    faulty = mutant(tmp_path, "tree_paths.cu", *FAULTS[fault])

    def get(source: str, defines: dict[str, int]) -> object:
        return faulty(source, defines) if source == "tree_paths_entry.cu" else shim(source, defines)

    with pytest.raises(AssertionError):
        world_of(ShimDevice(get), "a page and a tile begin inside the path").check(
            value=0
        )  # no wild page for what a fault leaves unwritten


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_everywhere(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    assert set(build(SOURCE, {}, arch).entries) == {"path_plan", "path_copy"}


def test_room_is_counted_and_trees_beyond_it_are_refused():
    paths = PathPages(256, 7, 64)
    assert (paths.each, paths.slots) == (2, 256 * 128) and PathPages(1, 7, 16).each == 2 and PathPages(1, 15, 16).each == 2
    assert PathPages(1, 16, 16).each == 2 and PathPages(1, 17, 16).each == 3, "15 keys of the context's page, then 18 of the path"
    tree, chain = ([-1, 0, 0, 2], [-1, 0, 1, 2])
    pages = page_table(2, 2)
    plan = make_plan([[1] * 4, [1] * 4], [chain, tree], [3, 9], pages)
    check_plan(plan, PathPages(8, 2, 16))
    check_plan(make_plan([[1] * 4], [chain], [3], pages[:1]), None)
    with pytest.raises(ValueError, match="executor verifies chains only"):
        check_plan(plan, None)
    with pytest.raises(ValueError, match="a draft tree of depth 2, private pages hold paths of depth 1"):
        check_plan(plan, PathPages(8, 1, 16))
    with pytest.raises(ValueError, match=r"max_num_batched_tokens: 1025 rows; .* attention takes 1024: lower it, or take chains"):
        PathPages(1025, 7, 64).check()


def test_a_cache_without_private_pages_behind_it_is_refused(shim):
    world = world_of(ShimDevice(shim), "a tile begins inside the path")
    world.cache = world.ops.zeros((LAYERS, world.slots, WIDTH))
    with pytest.raises(ValueError, match="want whole pages behind a layer of the latent cache"):
        world.attend(world.plan)
