"""The packed layout: exact inverses, its published index formulas, and faults that must show."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from runtime.w4 import UNIT_BYTES, W4, dequantise, expert_bytes, pack, scale_exponent, unpack

bf16 = ml_dtypes.bfloat16
SHAPES = [(1, 64, 32), (2, 128, 64), (3, 64, 224), (2, 192, 96), (1, 512, 128)]


def random_codes(e: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (e, n, k), dtype=np.uint8)
    scale = (rng.standard_normal((e, n, k // 32)) * 0.01).astype(bf16)
    return codes, scale


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_inverts_pack(shape, interleaved):
    codes, scale = random_codes(*shape)
    w = pack(codes, scale, interleaved)
    got_codes, got_scale = unpack(w)
    np.testing.assert_array_equal(got_codes, codes)
    np.testing.assert_array_equal(got_scale.view(np.uint16), scale.view(np.uint16))
    assert w.nbytes == w.data.nbytes == shape[0] * expert_bytes(shape[1], shape[2])


def test_pack_inverts_unpack():
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (2, 2, 3, UNIT_BYTES), dtype=np.uint8)
    data[..., 1025::2] &= 0x3F  # keep the scales finite and below 2
    w = W4(2, 128, 96, True, 0, data)
    codes, scale = unpack(w)
    np.testing.assert_array_equal(pack(codes, scale, True).data, data)


def test_layout_is_the_documented_one():
    """Reads single elements by the formulas of the module's docstring; the packer is not used."""
    codes, scale = random_codes(2, 128, 96, seed=1)
    w = pack(codes, scale)
    rng = np.random.default_rng(2)
    for _ in range(300):
        e, row, k = int(rng.integers(2)), int(rng.integers(128)), int(rng.integers(96))
        unit = w.data[e, row // 64, k // 32]
        r, i = row % 64, k % 32
        j, half, g = r // 16, r % 16 // 8, r % 8
        s, h, c, p = i // 16, i % 16 // 8, i % 8 // 2, i % 2
        byte = unit[512 * (j // 2) + 16 * (4 * g + c) + 4 * (2 * (j % 2) + s) + 2 * p + h]
        assert (byte >> 4 if half else byte & 15) == codes[e, row, k]
        assert unit[1024:].view(bf16)[8 * g + 2 * j + half] == scale[e, row, k // 32]


def test_fragment_word_masks_give_mma_registers():
    """Word (j, s) of lane 4 g + c: nibble i + 4 p is A register i, half p, of mma.m16n8k16."""
    codes, scale = random_codes(1, 64, 32, seed=3)
    unit = pack(codes, scale).data[0, 0, 0]
    for lane in range(32):
        g, c = lane // 4, lane % 4
        for j in range(4):
            for s in range(2):
                word = int(unit[512 * (j // 2) + 16 * lane + 4 * (2 * (j % 2) + s) :][:4].view(np.uint32)[0])
                for i in range(4):
                    for p in range(2):
                        row, k = 16 * j + g + 8 * (i & 1), 16 * s + 8 * (i >> 1) + 2 * c + p
                        assert (word >> (4 * (i + 4 * p))) & 15 == codes[0, row, k]


def test_interleave_puts_gate_and_up_eight_rows_apart():
    codes, scale = random_codes(1, 128, 32, seed=4)
    woven, plain = pack(codes, scale, True), pack(codes, scale, False)
    flat = unpack(dataclasses.replace(woven, interleaved=False))[0][0]
    for f in range(64):
        np.testing.assert_array_equal(flat[16 * (f // 8) + f % 8], codes[0, f])
        np.testing.assert_array_equal(flat[16 * (f // 8) + 8 + f % 8], codes[0, 64 + f])
    assert not np.array_equal(woven.data, plain.data)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dequantise(interleaved):
    codes, scale = random_codes(2, 128, 64, seed=6)
    w = pack(codes, scale, interleaved)
    want = (codes[1].astype(np.float64) - 8) * np.repeat(scale[1].astype(np.float64), 32, axis=1)
    got = dequantise(w, 1)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="expert 2"):
        dequantise(w, 2)


def test_one_fma_dequantisation_is_exact_to_one_rounding():
    """The subnormal trick in float64: nibble * 2**-133 * (s * 2**133) - 8 s = (u - 8) s for both halves."""
    u = np.arange(16)
    low = u.astype(np.uint16).view(bf16).astype(np.float64)
    high = (u << 4).astype(np.uint16).view(bf16).astype(np.float64)
    np.testing.assert_array_equal(low, u * 2.0**-133)
    np.testing.assert_array_equal(high, u * 2.0**-129)


def test_scale_exponent():
    for value, want in [(0.0, 0), (0.01, 0), (2.0**-6, 0), (2.0**-5 * 0.99, 0), (2.0**-5, 1), (0.9, 5), (3.0, 7)]:
        scale = np.array([[[value]]], bf16)
        p = scale_exponent(scale)
        assert p == want, value
        assert np.isfinite((scale.astype(np.float64) * 2.0 ** (133 - p)).astype(bf16).astype(np.float64)).all()
    with pytest.raises(ValueError, match="finite"):
        scale_exponent(np.array([np.nan], bf16))


def test_one_flipped_bit_shows():
    codes, scale = random_codes(1, 64, 64, seed=7)
    w = pack(codes, scale)
    for byte in (0, 700, 1023, 1024, 1151):
        data = w.data.copy()
        data[0, 0, 1, byte] ^= 0x10
        bad_codes, bad_scale = unpack(dataclasses.replace(w, data=data))
        changed = int((bad_codes != codes).sum()) + int((bad_scale.view(np.uint16) != scale.view(np.uint16)).sum())
        assert changed == 1


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        (np.zeros((1, 60, 32), np.uint8), np.zeros((1, 60, 1), bf16), "N = 60"),
        (np.zeros((1, 64, 40), np.uint8), np.zeros((1, 64, 1), bf16), "K = 40"),
        (np.zeros((1, 64, 32), np.int8), np.zeros((1, 64, 1), bf16), "int8"),
        (np.zeros((1, 64, 32), np.uint8), np.zeros((1, 64, 2), bf16), r"\(1, 64, 2\)"),
        (np.full((1, 64, 32), 16, np.uint8), np.zeros((1, 64, 1), bf16), "code is 16"),
        (np.zeros((1, 64, 32), np.uint8), np.full((1, 64, 1), np.inf, bf16), "finite"),
    ],
)
def test_bad_input_is_named(codes, scale, message):
    with pytest.raises(ValueError, match=message):
        pack(codes, scale)


def test_wrong_data_shape_is_named():
    w = pack(*random_codes(1, 64, 32))
    with pytest.raises(ValueError, match="needs uint8"):
        dataclasses.replace(w, K=64)
