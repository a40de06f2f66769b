"""Repacking and hashed weights on the CPU shim: bit for bit what model/pack_w4.py and runtime/hashed.py make; planted faults."""

from __future__ import annotations

import math

import numpy as np
import pytest

from model.pack_w4 import codes_from_triple, triple_from_codes, w4_from_experts, w4_from_gate_up
from runtime.hashed import hashed
from runtime.kernels_cu import fill, repack_w4
from runtime.kernels_cu._build import ARCHITECTURES, build, nvrtc_version
from runtime.source import HashWindow
from runtime.w4 import UNIT_BYTES
from tests.mutants import mutant
from tests.shim_calls import address, bf16, run_call


def triple(rng, n: int, k: int, power: float = -7.0):
    scale = (2.0**power * (0.5 + rng.random((n, k // 32))) * rng.choice([-1, 1], (n, k // 32))).astype(bf16)
    return triple_from_codes(rng.integers(0, 16, (n, k), dtype=np.uint8), scale)


def repack(get, parts, row: int = 0, rows: int = 0):
    """Packed rows from `row` on of the triples, and the largest scale's bits; outputs start as ones."""
    rows = rows or sum(p[0].shape[0] for p in parts)
    k, each = parts[0][0].shape[1] * 8, rows // len(parts)
    out, largest = np.full((rows // 64, k // 32, UNIT_BYTES), 0xFF, np.uint8), np.zeros(1, np.uint32)
    first = row // len(parts)
    cut = [[np.ascontiguousarray(a[first : first + each]) for a in p[:2]] for p in parts]
    words, scale = ([address(p[i]) for p in cut] for i in (0, 1))
    call = repack_w4.call(words, scale, address(out), address(largest), rows=rows, k=k)
    run_call(get("repack_w4_entry.cu", {}), call)
    return out, int(largest[0])


def check_plain(get, rng) -> None:
    for n, k in ((64, 32), (192, 160), (128, 256)):
        one = triple(rng, n, k)
        want = w4_from_experts([codes_from_triple(*one)])
        out, largest = repack(get, [one])
        np.testing.assert_array_equal(out, want.data[0])
        assert repack_w4.exponent_of(largest) == want.exponent == 0


def check_woven(get, rng) -> None:
    for n, k in ((32, 64), (96, 160)):
        gate, up = triple(rng, n, k), triple(rng, n, k)
        want = w4_from_gate_up([codes_from_triple(*gate)], [codes_from_triple(*up)])
        np.testing.assert_array_equal(repack(get, [gate, up])[0], want.data[0])
        np.testing.assert_array_equal(repack(get, [gate, up], row=2 * n - 64, rows=64)[0], want.data[0, -1:])


def test_is_what_the_host_packs(shim, rng):
    check_plain(shim, rng)
    check_woven(shim, rng)


@pytest.mark.parametrize("power", [-7.0, -4.9, 0.0, 3.0])
def test_finds_the_exponent(shim, rng, power):
    one = triple(rng, 64, 64, power)
    want = w4_from_experts([codes_from_triple(*one)])
    assert repack_w4.exponent_of(repack(shim, [one])[1]) == want.exponent
    assert (want.exponent > 0) == (power > -5.5)


def test_a_scale_that_is_no_number_is_refused(shim, rng):
    for bad in (math.nan, -math.inf):
        words, scale, shape = triple(rng, 64, 64)
        scale[5, 1] = bad
        with pytest.raises(ValueError, match="a scale is not finite"):
            repack_w4.exponent_of(repack(shim, [(words, scale, shape)])[1])


FAULTS = {
    "rows not woven": ("r / 16 * 8 + r % 8", "r / 2"),
    "the wrong part": ("r / 8 % 2 : 0", "r / 16 % 2 : 0"),
    "halves changed about": ("16 * (2 * pair + side) + 8 * half + g, part", "16 * (2 * pair + side) + 8 * (1 - half) + g, part"),
    "nibbles changed about": ("(byte & 15u) << (8", "(byte >> 4) << (8"),
    "another byte": (">> (8 * c) & 255u", ">> (8 * (3 - c)) & 255u"),
    "a strip left out": ("(size_t)strip * p.groups + group", "(size_t)group"),
    "scales in the wrong rows": ("place(8 * i + g, part)", "place(8 * g + i, part)"),
    "the sign of a scale lost": ("made[i / 2] |= bits <<", "made[i / 2] |= size <<"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_shows(tmp_path, rng, fault):
    get = mutant(tmp_path, repack_w4.SOURCE, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check_plain(get, rng)
        check_woven(get, rng)


WINDOWS = [
    HashWindow(0x9E3779B9, 0.0, 0.02, "bf16", 70, (3, 9), (5, 64)),
    HashWindow(7, 1.0, 0.0, "bf16", 300, (0, 1), (0, 300)),
    HashWindow(0xFFFFFFFF, 0.25, 0.05, "f32", 2100, (1, 3), (10, 2090)),
    HashWindow(12, 0.0, 0.0, "i32", 33, (0, 4), (1, 33)),
    HashWindow(12, 0.0, 1.0, "f32", 1 << 31, (2, 5), (7, 40)),  # indices beyond 32 bits
]


def check_hash(get) -> None:
    for window in WINDOWS:
        want = hashed(window)
        out = np.full(window.shape, 77, np.uint16 if window.dtype == "bf16" else want.dtype)
        run_call(get("fill_entry.cu", {}), fill.call(window, address(out)))
        np.testing.assert_array_equal(out, want.view(np.uint16) if window.dtype == "bf16" else want)


def test_hashed_weights_have_the_definition_s_bits(shim):
    check_hash(shim)


HASH_FAULTS = [("(uint32_t)(index >> 32)", "0"), ("p.col + col;", "col;"), ("- 131070", "- 131072"), ("p.mean, mul_rn", "0.f, mul_rn")]


@pytest.mark.parametrize(("old", "new"), HASH_FAULTS)
def test_a_fault_in_the_hash_shows(tmp_path, old, new):
    with pytest.raises(AssertionError):
        check_hash(mutant(tmp_path, fill.SOURCE, old, new))


def test_what_can_not_be_packed_is_named():
    with pytest.raises(ValueError, match=r"1 parts of 65 rows and 32 inputs"):
        repack_w4.call([256], [256], 256, 256, rows=65, k=32)
    with pytest.raises(ValueError, match="not f16"):
        fill.call(HashWindow(1, 0.0, 1.0, "f16", 4, (0, 1), (0, 4)), 256)


@pytest.mark.skipif(nvrtc_version() is None, reason="no NVRTC library (pip install nvidia-cuda-nvrtc cuda-bindings)")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_stack_or_spills(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    assert set(build(repack_w4.SOURCE, {}, arch).entries) == set(repack_w4.ENTRIES)
    assert set(build(fill.SOURCE, {}, arch).entries) >= set(fill.ENTRIES)
