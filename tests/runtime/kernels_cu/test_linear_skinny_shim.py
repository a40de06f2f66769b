"""Skinny products on the CPU shim: kernels_np in bfloat16, heads and strides, splits, dead rows, equal bits at every M, faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from runtime.hw import HARDWARE
from runtime.kernels_cu import linear_lt, linear_skinny
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.kernels_cu.linear_skinny import Config, Dims, workspace_bytes
from runtime.ops import OPS
from tests.mutants import mutant
from tests.runtime.kernels_cu.linear_cases import check_absorbing, check_product, check_row_bits, check_values
from tests.shim_calls import address, bf16, run_call

needs_nvrtc = pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")


def run(get, config: Config, dims: Dims, w, x, out, seq=None, times: int = 1, descending: bool = False) -> None:
    """Twice over the same workspace if asked: the counters must be as they were."""
    room = {name: np.full(size, 0xFF, np.uint8) for name, size in workspace_bytes(dims, config).items()}
    room["arrived"][:] = 0
    at = {n: address(a) for n, a in (room | {"w": w, "x": x, "out": out, "seq": seq}).items()}
    for _ in range(times):
        call = linear_skinny.call(config, dims, at, out.dtype == np.float32)
        run_call(get("linear_skinny_entry.cu", config.defines()), call, descending)
    assert (room["arrived"] == 0).all()


def check(get, rng, config: Config, m: int, n: int, k: int, kind=bf16, descending: bool = False) -> None:
    check_product(lambda *case: run(get, *case, descending=descending), rng, config, m, n, k, kind)


SHAPES = [
    (Config(8, 2, 1, 2, 1), 1, 32, 32),
    (Config(8, 2, 1, 2, 1), 8, 48, 96),
    (Config(16, 4, 2, 4, 1), 16, 80, 416),
    (Config(16, 1, 4, 1, 2), 9, 16, 288),
    (Config(8, 2, 2, 2, 3), 5, 64, 320),
    (Config(16, 2, 1, 3, 5), 11, 48, 160),
]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("config", "m", "n", "k"), SHAPES)
def test_is_the_definition(shim, rng, config, m, n, k, descending):
    check(shim, rng, config, m, n, k, descending=descending)
    check(shim, rng, config, m, n, k, np.float32, descending)


def test_a_row_has_the_same_bits_at_every_m(shim, rng):
    check_row_bits(partial(run, shim), rng, Config(16, 2, 2, 2, 2), Config(8, 2, 2, 4, 2), 48)


def test_absorbing_the_keys(shim, rng):
    check_absorbing(partial(run, shim), rng, Config(8, 2, 1, 2, 2))


def test_values_of_heads(shim, rng):
    check_values(partial(run, shim), rng, Config(16, 1, 3, 1, 1), 96, 32)


FAULTS = {
    "inputs that do not agree": ("mma_bf16(sum[n], high, b.z, b.w);", "mma_bf16(sum[n], high, b.w, b.z);"),
    "the first batch twice": ("load(even, chunk + 2 * DEPTH);", ""),
    "a chunk too few": ("const int first = from + (to - from) * wk / WK, end = from + (to - from) * (wk + 1) / WK;",
                        "const int first = from + (to - from) * wk / WK, end = from + (to - from) * (wk + 1) / WK - 1;"),
    "warps along K lost": ("for (int k = 1; k < WK; ++k)", "for (int k = 2; k < WK; ++k)"),
    "splits lost": ("for (int s = 0; s < p.splits; ++s) {", "for (int s = 1; s < p.splits; ++s) {"),
    "a counter left standing": ("if (tid == 0) *counter = 0;", ""),
    "rows eight apart changed about": ("+ g + i / 2 * 8;", "+ g + (1 - i / 2) * 8;"),
    "a dead row": ("(p.seq && p.seq[m] < 0)", "false"),
    "x of another slice": ("(long long)from * kChunk + 8 * v)", "8 * v)"),
    "columns beyond the eighth": ("(8 * n + g) * row_bytes", "g * row_bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, linear_skinny.SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check(get, rng, Config(16, 2, 2, 2, 2), 12, 48, 640)


def test_what_the_kernel_cannot_take_is_named():
    with pytest.raises(ValueError, match=r"M = 17 is outside 1\.\.16"):
        Dims.plain(17, 16, 32).check()
    with pytest.raises(ValueError, match=r"N = 24 is not a positive multiple of 16"):
        Dims.plain(1, 24, 32).check()
    with pytest.raises(ValueError, match=r"2 splits of 2 warps, but K = 96 has 3 chunks"):
        Config(8, 1, 2, 1, 2).check(Dims.plain(1, 16, 96))
    with pytest.raises(ValueError, match=r"bytes of shared memory, 101376 fit on sm_89; more splits"):
        Config(16, 8, 1, 4, 1).check(Dims.plain(16, 128, 18_432), "sm_89")


KIMI = [(2112, 7168), (12_288, 1536), (7168, 8192), (4096, 7168), (7168, 2048), (384, 7168), (20_480, 7168), (7168, 18_432)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kimi_product_has_a_configuration(arch):
    """The same for every M but for its columns, and no candidate is predicted to be faster at 16 rows."""
    hw = HARDWARE["h200"]
    for n, k in KIMI:
        dims = Dims.plain(16, n, k)
        chosen = linear_skinny.default_config(dims, hw, arch)
        chosen.check(dims, arch)
        times = [linear_skinny.predict_us(dims, c, hw, arch=arch) for c in linear_skinny.candidates(dims, arch)]
        assert linear_skinny.predict_us(dims, chosen, hw, arch=arch) == min(times)
        assert min(times) >= OPS["linear"].cost({"M": 16, "N": n, "K": k}).floor_us(hw)
        few = linear_skinny.default_config(Dims.plain(1, n, k), hw, arch)
        few.check(Dims.plain(1, n, k), arch)
        assert (few.columns, chosen.columns) == (8, 16) and replace(few, columns=16) == chosen


def test_lt_describes_the_same_product(rng):
    """The description, read as column-major memory, against the definition; a wrong leading dimension shows."""
    m, heads, nope, rope, latent = 4, 3, 16, 8, 24
    q, w, out = (
        rng.standard_normal(s).astype(np.float32) for s in ((m, heads, nope + rope), (heads, latent, nope), (m, heads, latent + rope))
    )
    dims = Dims.absorb(m, heads, nope, rope, latent)
    strides = {"x_row": dims.x_row, "out_row": dims.out_row, "heads": heads, "x_head": dims.x_head, "out_head": dims.out_head}
    found = linear_lt.describe(m, latent, nope, **strides, float_out=True)

    def view(array, layout, batch):
        steps = [4 * s for s in (layout.batch_stride, 1, layout.ld)]
        return np.lib.stride_tricks.as_strided(array, (batch, layout.rows, layout.cols), steps)

    a, b, d = (view(array, layout, found.batch) for array, layout in ((w, found.a), (q, found.b), (out, found.d)))
    assert (found.op_a, found.op_b) == (linear_lt.OP_T, linear_lt.OP_N)
    d[...] = np.matmul(a.transpose(0, 2, 1), b)
    want = np.einsum("mak,ank->man", q[:, :, :nope], w)
    np.testing.assert_allclose(out[:, :, :latent], want, rtol=1e-5, atol=1e-5)
    wrong = linear_lt.Layout(found.b.kind, found.b.rows, found.b.cols, nope, found.b.batch_stride)
    assert not np.allclose(np.matmul(a.transpose(0, 2, 1), view(q, wrong, heads)).transpose(2, 0, 1), want)
    with pytest.raises(ValueError, match="strides of 8 and 4"):
        linear_lt.describe(2, 4, 16, x_row=8, out_row=4)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    dims = [Dims.plain(m, n, k) for n, k in KIMI for m in (1, 16)]
    chosen = {tuple(linear_skinny.default_config(d, HARDWARE["h200"], arch).defines().items()) for d in dims}
    for defines in chosen:
        entries = build(linear_skinny.SOURCE, dict(defines), arch).entries
        assert set(entries) == set(linear_skinny.ENTRIES) and max(e.registers for e in entries.values()) <= 200
