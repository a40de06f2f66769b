"""Draft trees over a latent cache and, for each row, its path once more as plain decoding has it: for a shim or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.tree_mla_config import VALUE, WIDTH
from runtime.kernels_cu.tree_paths import PathPages
from runtime.kernels_np import mla
from runtime.ops import OPS
from runtime.types import StepPlan
from tests.compare import check_bitwise, compare
from tests.device_plans import Room, place_step, poison
from tests.plans import make_plan, page_table
from tests.runtime.kernels_cu.mla_cases import SCALE, bf16

LAYERS, DEEPEST = 2, 8
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

    device: Any
    page: int
    parents: list[list[int]]
    ctx: list[int]
    seed: int = 0
    heads: int = 2

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
        self.q = (0.25 * rng.standard_normal((m, self.heads, WIDTH)) * (1 + 4 * (rng.random((m, self.heads, 1)) > 0.8))).astype(bf16)
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
        q, out = ops.buffer("q", (rows, self.heads, WIDTH)), [ops.buffer(f"out{i}", (rows, self.heads, VALUE)) for i in range(LAYERS)]
        f = fields
        with ops.recording(fields.seq, fields.live) as launches:
            for i in range(LAYERS):
                ops.tree_mla(
                    q, self.cache[i], f.pages, self.page, f.ctx, f.row0, f.seq, f.pos, f.slot, f.ancestors, SCALE, out=out[i]
                )  # fmt: skip
        poison(ops, (), value)
        self.device.upload(q.address, self.q[: plan.m].view(np.uint16))
        for one in launches:
            one.run.run(self.device.stream)
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


def world_of(device: Any, name: str, seed: int = 0) -> World:
    page, nodes, ctx = TREES[name]
    rng = np.random.default_rng(100 + seed)
    return World(device, page, [random_tree(rng, n) if n else CHAIN for n in nodes], ctx, seed)


def random_world(device: Any, page: int, seed: int, longest: int = 200, heads: int = 2) -> World:
    """One to four trees of up to 19 nodes, after up to `longest` committed tokens each."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    nodes = [int(n) for n in rng.integers(1, 20, count)]
    ctx = [int(c) for c in rng.integers(0, (20, longest)[seed % 2], count)]
    return World(device, page, [random_tree(rng, n) for n in nodes], ctx, seed, heads)
