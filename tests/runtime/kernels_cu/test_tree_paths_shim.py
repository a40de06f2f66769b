"""Rows of draft trees on the CPU shim have the bits of plain decoding: attention over private pages, layers that share them, faults."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest

from runtime.kernels_cu import record_attention
from runtime.kernels_cu import tree_mla as family
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.tree_mla_config import VALUE, WIDTH, Config
from runtime.kernels_cu.tree_paths import SOURCE, PathPages, check_plan
from runtime.kernels_np import mla
from runtime.ops import OPS
from runtime.types import StepPlan
from tests.compare import check_bitwise, compare
from tests.device_plans import Room, place_step, poison
from tests.mutants import mutant
from tests.plans import make_plan, page_table
from tests.runtime.kernels_cu.mla_cases import SCALE, bf16
from tests.shim_device import ShimDevice

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
HEADS, LAYERS, DEEPEST = 2, 2, 8
CHAIN = list(range(-1, 4))
SUMMED = slice(256, VALUE)


def random_tree(rng: np.random.Generator, nodes: int, deepest: int = DEEPEST) -> list[int]:
    """Parents of a tree that goes down as often as it branches, its root node 0."""
    parent, depth = [-1], [0]
    for i in range(1, nodes):
        open_nodes = [j for j in range(i) if depth[j] < deepest]
        parent.append(i - 1 if depth[i - 1] < deepest and rng.random() < 0.45 else int(rng.choice(open_nodes)))
        depth.append(depth[parent[i]] + 1)
    return parent


@dataclass
class World:
    """A backend over a latent cache of two layers: what no key lies in is NaN, private pages too."""

    get: object
    page: int
    parents: list[list[int]]
    ctx: list[int]
    seed: int = 0
    kind: type[ShimDevice] = ShimDevice

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [len(p) for p in self.parents]
        self.plain_each = -(-(max(self.ctx) + DEEPEST + 2) // self.page)
        each = -(-(max(c + n for c, n in zip(self.ctx, counts, strict=True))) // self.page)
        pages = page_table(len(counts), each, rng)
        self.plan = make_plan([[0] * n for n in counts], self.parents, self.ctx, pages, self.page)
        m, first = self.plan.m, int(pages.max()) + 1
        self.plain_pages = first + np.arange(m * self.plain_each, dtype=np.int32).reshape(m, self.plain_each)
        self.slots = (int(self.plain_pages.max()) + 1) * self.page
        self.q = (0.25 * rng.standard_normal((m, HEADS, WIDTH)) * (1 + 4 * (rng.random((m, HEADS, 1)) > 0.8))).astype(bf16)
        self.device = self.kind(self.get)
        self.ops = CudaBackend(self.device, invariant=True)
        self.paths = PathPages(m + 3, DEEPEST, self.page)
        self.cache = self.ops.latent_cache(LAYERS, self.slots, WIDTH, self.paths)
        self.host = np.full((LAYERS, self.slots, WIDTH), np.nan, bf16)
        self._fill(rng)

    def _fill(self, rng: np.random.Generator) -> None:
        """Keys of the plan's sequences, and for each row its path once more in order of position, in pages of its own.

        Where an order of summation must show: in the columns SUMMED keys are of all magnitudes, and a node takes back what was summed
        before it, so the roundings of the sum are what is left. No query looks at those columns; head 0 weighs all keys alike.
        """
        plan, place = self.plan, lambda pages, at: pages[at // self.page] * self.page + at % self.page
        self.q[:, 0] = self.q[:, :, SUMMED] = 0
        for b, ctx in enumerate(self.ctx):
            at = np.arange(ctx + len(self.parents[b]))
            keys = rng.standard_normal((LAYERS, len(at), WIDTH))
            keys[:, :, SUMMED] *= 2.0 ** rng.integers(-12, 12, (LAYERS, len(at), 1))
            self.host[:, place(plan.pages[b], at)] = keys
        for row in range(plan.m):
            b = int(plan.seq[row])
            seen = [j for j in range(len(self.parents[b])) if plan.ancestors[row, j // 64] >> np.uint64(j % 64) & np.uint64(1)]
            at = np.array([*range(self.ctx[b]), *(self.ctx[b] + j for j in seen)])
            there = place(plan.pages[b], at)
            if len(seen) > 1:
                self.host[:, there[-1], SUMMED] = -self.host[:, there[:-1], SUMMED].astype(np.float64).sum(1)
            self.host[:, place(self.plain_pages[row], np.arange(len(at)))] = self.host[:, there]
        self.device.upload(self.cache.address, self.host.view(np.uint16))
        self.device.upload(self.ops.path_slots.address, np.full((self.paths.slots, WIDTH), 0xFFFF, np.uint16))

    def attend(self, plan: StepPlan, dead: int = 3, value: int = 0xFF) -> np.ndarray:
        """[layers, m, A, 512] of a plan over both layers, in a bucket with that many dead rows; buffers hold any bytes before."""
        rows, ops = plan.m + dead, self.ops
        fields = place_step(self.device, plan, Room(rows, len(plan.ctx) + 1, plan.pages.shape[1], plan.ancestors.shape[1]))
        q, out = ops.buffer("q", (rows, HEADS, WIDTH)), [ops.buffer(f"out{i}", (rows, HEADS, VALUE)) for i in range(LAYERS)]
        f = fields
        with ops.recording(fields.seq, fields.live) as launches:
            for i in range(LAYERS):
                ops.tree_mla(
                    q, self.cache[i], f.pages, self.page, f.ctx, f.row0, f.seq, f.pos, f.slot, f.ancestors, SCALE, out=out[i]
                )  # fmt: skip
        poison(ops, (), value)
        self.device.upload(q.address, self.q[: plan.m].view(np.uint16))
        for one in launches:
            one.run.run(0)
        self.launches = launches
        return np.stack([ops.host(o)[: plan.m] for o in out]).astype(np.float32)

    def plain(self, rows: slice = slice(None)) -> np.ndarray:
        """The same of these rows as tokens decoded one by one: each a chain of one, the keys before it committed."""
        plan, at = self.plan, np.arange(self.plan.m)[rows]
        tokens = make_plan([[0]] * len(at), [[-1]] * len(at), plan.pos[at], self.plain_pages[at], self.page)
        held, self.ops.paths, self.q = (self.ops.paths, self.q), None, self.q[at]
        found = self.attend(tokens, dead=0)
        self.ops.paths, self.q = held
        return found

    def check(self, value: int = 0x7E) -> None:
        """Bits of plain decoding, whatever the buffers held before, and the definition's numbers."""
        plan, got = self.plan, self.attend(self.plan, value=value)
        check_bitwise(got, self.plain())
        for i in range(LAYERS):
            want = np.empty(got[i].shape, np.float32)
            parts = (plan.pages, self.page, plan.ctx, plan.row0, plan.seq, plan.pos, plan.slot, plan.ancestors, SCALE)
            mla.tree_mla(self.q, self.host[i], *parts, out=want)
            own = np.ones(VALUE, bool)
            own[SUMMED] = False  # but for roundings, zero
            found = compare(got[i][..., own], want[..., own], OPS["tree_mla"].tolerance)
            assert found.ok, f"layer {i}: {found}"


TREES = {  # page, rows of each sequence (0: a chain), committed tokens
    "a page begins inside the path": (16, [9, 0, 6], [29, 5, 58]),
    "the path begins a page, or a sequence": (64, [9, 5, 0], [64, 0, 3]),
    "a tile begins inside the path": (64, [11, 10], [63, 125]),
    "ranges of keys": (32, [6, 0, 5], [545, 70, 511]),
    "more nodes than a word": (16, [66], [17]),
    "a page and a tile begin inside the path": (16, [9], [59]),
}


def world_of(get: object, name: str, seed: int = 0, kind: type[ShimDevice] = ShimDevice) -> World:
    page, nodes, ctx = TREES[name]
    rng = np.random.default_rng(100 + seed)
    return World(get, page, [random_tree(rng, n) if n else CHAIN for n in nodes], ctx, seed, kind)


@pytest.fixture
def fine(monkeypatch):
    """Every tile of keys is a range of its own."""
    monkeypatch.setattr(record_attention, "_LEAST_TILES", 1)


@pytest.mark.parametrize("name", TREES)
def test_a_trees_rows_have_the_bits_of_plain_decoding(shim, name):
    """Every row, in both layers, beside chains and dead rows."""
    world_of(shim, name).check()


def test_ranges_of_a_tile_and_a_row_alone(shim, fine):
    """Decoded in a bucket of one, as plain decoding is."""
    world = world_of(shim, "a tile begins inside the path", seed=1)
    world.check()
    together = world.attend(world.plan)
    for row in (3, 10, 20):
        check_bitwise(world.plain(slice(row, row + 1)), together[:, row : row + 1], f"row {row}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("page", [16, 32, 64])
def test_random_trees(shim, page, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    nodes = [int(n) for n in rng.integers(1, 20, count)]
    ctx = [int(c) for c in rng.integers(0, (20, 200)[seed % 2], count)]
    World(shim, page, [random_tree(rng, n) for n in nodes], ctx, seed).check()


class Hopper(ShimDevice):
    """A shim whose attention is built for wgmma and the copy engine."""

    arch = "sm_90a"

    def functions(self, source, defines, entries):
        if not source.startswith("tree_mla"):
            return super().functions(source, defines, entries)
        library = self._get("mla_run_entry.cu", dict(defines))
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
    world_of(shim, name, kind=Hopper).check()


def test_a_chain_costs_no_copy(shim):
    """Rows that see all before them stay one sequence: no key is copied for them, and the root and its first line need none."""
    world = world_of(shim, "a page begins inside the path")
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
    world = world_of(shim, "a tile begins inside the path")
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
        world_of(get, "a page and a tile begin inside the path").check(value=0)  # no wild page for what a fault leaves unwritten


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
    world = world_of(shim, "a tile begins inside the path")
    world.cache = world.ops.zeros((LAYERS, world.slots, WIDTH))
    with pytest.raises(ValueError, match="want whole pages behind a layer of the latent cache"):
        world.attend(world.plan)
