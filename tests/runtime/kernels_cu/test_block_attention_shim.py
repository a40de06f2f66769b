"""The drafter's attention on the CPU shim: kernels_np in bfloat16, page boundaries, empty splits, dead streams, planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.kernels_cu import block_attention
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.block_attention import Config, Dims, calls, workspace_bytes
from runtime.kernels_np import draft as define
from runtime.ops import OPS
from tests.compare import check_close
from tests.mutants import mutant
from tests.shim_calls import address, bf16, poisoned, random_bf16, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
KIMI = Dims(B=2, T=8, A=16, Z=2, J=128, P=5, page_size=16)
SMALL = Dims(B=3, T=3, A=4, Z=2, J=64, P=20, page_size=8)


class World:
    """Streams of given contexts over shuffled pages. Every cache slot that no position names is NaN, as is a dead stream's data."""

    def __init__(self, rng, dims: Dims, ctx: list[int]) -> None:
        self.dims = d = dims
        self.ctx = np.array(ctx, np.int32)
        count = d.B * d.P
        self.pages = (1 + rng.permutation(count)).reshape(d.B, d.P).astype(np.int32)
        slots = (count + 1) * d.page_size
        self.k_cache, self.v_cache = poisoned(slots, d.Z, d.J), poisoned(slots, d.Z, d.J)
        self.q, self.k = random_bf16(rng, d.B * d.T, d.A, d.J), random_bf16(rng, d.B * d.T, d.Z, d.J)
        self.v = random_bf16(rng, d.B * d.T, d.Z * d.J)
        for b, n in enumerate(ctx):
            if n < 0:
                for array in (self.q, self.k, self.v):
                    array.reshape(d.B, -1)[b] = np.nan
                self.pages[b] = 1 << 30
                continue
            used = define.slots_of(self.pages[b], d.page_size, n)
            self.k_cache[used], self.v_cache[used] = random_bf16(rng, n, d.Z, d.J, scale=2), random_bf16(rng, n, d.Z, d.J)

    def check(self, get, config: Config, descending: bool = False) -> None:
        d = self.dims
        room = {name: np.full(size, 0xFF, np.uint8) for name, size in workspace_bytes(d, config).items()}
        out = np.full((d.B * d.T, d.A * d.J), 777, bf16)  # a dead stream's numbers are NaN, so NaN would not show there
        names = ("q", "k", "v", "k_cache", "v_cache", "pages", "ctx")
        at = {n: address(getattr(self, n)) for n in names} | {n: address(a) for n, a in (room | {"out": out}).items()}
        for call in calls(config, d, d.J**-0.5, at):
            run_call(get("block_attention_entry.cu", config.defines(d)), call, descending)
        live = np.flatnonzero(self.ctx >= 0)
        rows = (live[:, None] * d.T + np.arange(d.T)).ravel()
        want, part = np.full(out.shape, 777, bf16), poisoned(len(rows), d.A * d.J)
        inputs = (self.q[rows], self.k[rows], self.v[rows], self.k_cache, self.v_cache, self.pages[live])
        define.block_attention(*inputs, d.page_size, self.ctx[live], d.J**-0.5, out=part)
        want[rows] = part
        check_close(out.astype(np.float32), want.astype(np.float32), OPS["block_attention"].tolerance, "block_attention")


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize(("dims", "ctx"), [(KIMI, [80, 37]), (SMALL, [0, 29, 160]), (SMALL, [1, 7, 8])])
def test_is_the_definition(shim, rng, dims, ctx, splits, descending):
    World(rng, dims, ctx).check(shim, Config(splits), descending)


def test_dead_streams_write_nothing(shim, rng):
    World(rng, SMALL, [40, -1, 3]).check(shim, Config(2))
    World(rng, SMALL, [-1, -1, 12]).check(shim, Config(2, stages=2))


def test_rows_beyond_a_whole_fragment(shim, rng):
    """21 rows share a kv head: two warps, eleven rows of the second are none."""
    World(rng, Dims(B=1, T=7, A=3, Z=1, J=128, P=4, page_size=32), [70]).check(shim, Config(2))


def test_large_scores_do_not_overflow(shim, rng):
    world = World(rng, SMALL, [33, 64, 90])
    world.q *= world.q.dtype.type(60)
    world.check(shim, Config(3))


FAULTS = {
    "keys beyond the last": (">= keys) score[n][i]", ">= keys + 9) score[n][i]"),
    "the block's first key for all": ("b * p.T + position - ctx;", "b * p.T;"),
    "values from the keys": ("row_of(p.v_cache, p.v, tile", "row_of(p.v_cache, p.k, tile"),
    "a page too far": ("position % p.page_size :", "(position + 1) % p.page_size :"),
    "sums not rescaled": ("sum[n][2 * h] *= keep;", ""),
    "weights not rescaled": ("weight[h] *= keep;", ""),
    "swizzle on one side": ("+ swizzled(key, piece), row", "+ key * kRowBytes + 16 * piece, row"),
    "another kv head": ("(size_t)place * p.Z + z)", "(size_t)place * p.Z + 0)"),
    "splits not weighed": ("const float factor = exp2_fast((p.stats[2 * here] - largest) * p.scale);", "const float factor = 1.f;"),
    "a split forgotten": ("for (int s = 0; s < p.splits; ++s) {", "for (int s = 0; s < p.splits - 1; ++s) {"),
    "a dead stream": ("if (p.ctx[b] < 0 || row", "if (row"),
    "heads in another order": ("p.q + ((size_t)(b * p.T + row / group) * p.A + z * group + row % group)",
                               "p.q + ((size_t)(b * p.T + row / group) * p.A + row % group * p.Z + z)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, block_attention.SOURCE, *FAULTS[fault])
    config = Config(2)
    with pytest.raises(AssertionError):
        World(rng, SMALL, [4, -1, 155]).check(get, config)


def test_what_the_kernels_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"J = 96"):
        Dims(1, 8, 8, 8, 96, 1, 16).check()
    with pytest.raises(ValueError, match=r"512 rows share a kv head"):
        Dims(1, 8, 64, 1, 128, 1, 16).check()
    for dims in (KIMI, SMALL):
        for config in block_attention.candidates(dims):
            config.check(dims)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    for dims in (Dims(B=1, T=8, A=64, Z=8, J=128, P=1, page_size=16), SMALL):
        entries = build(block_attention.SOURCE, Config().defines(dims), arch).entries
        assert set(entries) == set(block_attention.ENTRIES) and max(e.registers for e in entries.values()) <= 200
