"""Triple, codes, W4 and Marlin's order: exact inverses, known words, and faults that must show."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from model.pack_w4 import (
    codes_from_marlin,
    codes_from_triple,
    marlin_from_codes,
    pack_words,
    triple_from_codes,
    triple_from_w4,
    unpack_words,
    w4_from_experts,
    w4_from_gate_up,
)
from runtime.w4 import dequantise, unpack

bf16 = ml_dtypes.bfloat16


def matrix(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 16, (n, k), dtype=np.uint8), (rng.standard_normal((n, k // 32)) * 0.01).astype(bf16)


def test_words_hold_the_first_input_lowest():
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 8]], np.uint8)
    np.testing.assert_array_equal(pack_words(codes).view(np.uint32), np.array([[0x87654321]], np.uint32))
    np.testing.assert_array_equal(unpack_words(np.array([[-1]], np.int32)), np.full((1, 8), 15))


@pytest.mark.parametrize("shape", [(64, 32), (128, 96), (64, 256)])
def test_triple_round_trip(shape):
    codes, scale = matrix(*shape)
    packed, s, dims = triple_from_codes(codes, scale)
    assert packed.dtype == np.int32 and packed.shape == (shape[0], shape[1] // 8) and tuple(dims) == shape
    got, got_scale = codes_from_triple(packed, s, dims)
    np.testing.assert_array_equal(got, codes)
    np.testing.assert_array_equal(got_scale.view(np.uint16), scale.view(np.uint16))
    again, _, _ = triple_from_codes(got, got_scale)
    np.testing.assert_array_equal(again, packed)


def test_triple_that_disagrees_is_named():
    packed, scale, dims = triple_from_codes(*matrix(64, 64))
    with pytest.raises(ValueError, match="weight_packed"):
        codes_from_triple(packed, scale, dims + np.array([0, 32]))
    with pytest.raises(ValueError, match="weight_scale"):
        codes_from_triple(packed, scale[:, :1], dims)
    with pytest.raises(ValueError, match="int32"):
        codes_from_triple(packed.astype(np.int64), scale, dims)


def test_w4_round_trip_by_expert():
    experts = [matrix(128, 64, seed) for seed in range(3)]
    w = w4_from_experts(experts)
    for e, (codes, scale) in enumerate(experts):
        packed, s, dims = triple_from_w4(w, e)
        want, want_scale, _ = triple_from_codes(codes, scale)
        np.testing.assert_array_equal(packed, want)
        np.testing.assert_array_equal(s.view(np.uint16), want_scale.view(np.uint16))
        assert tuple(dims) == (128, 64)


def test_gate_up_keeps_natural_rows_outside():
    gate, up = [matrix(64, 32, 1)], [matrix(64, 32, 2)]
    w = w4_from_gate_up(gate, up)
    assert w.interleaved and (w.N, w.K) == (128, 32)
    codes, _ = unpack(w)
    np.testing.assert_array_equal(codes[0, :64], gate[0][0])
    np.testing.assert_array_equal(codes[0, 64:], up[0][0])
    swapped = w4_from_gate_up(up, gate)
    assert not np.array_equal(dequantise(w, 0), dequantise(swapped, 0))


def test_experts_of_two_shapes_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        w4_from_experts([matrix(64, 32), matrix(128, 32)])


@pytest.mark.parametrize("shape", [(64, 32), (128, 64), (192, 96)])
def test_marlin_round_trip(shape):
    codes, scale = matrix(*shape, seed=3)
    words, scales = marlin_from_codes(codes, scale)
    assert words.shape == (shape[1] // 16, 2 * shape[0]) and scales.shape == (shape[1] // 32, shape[0])
    got, got_scale = codes_from_marlin(words, scales)
    np.testing.assert_array_equal(got, codes)
    np.testing.assert_array_equal(got_scale.view(np.uint16), scale.view(np.uint16))
    again, again_scales = marlin_from_codes(got, got_scale)
    np.testing.assert_array_equal(again, words)
    np.testing.assert_array_equal(again_scales.view(np.uint16), scales.view(np.uint16))


def test_marlin_known_words():
    """v0..v3 at inputs 0, 1, 8, 9 of column n, v4..v7 of column n + 8, stored v0 v2 v4 v6 v1 v3 v5 v7."""
    codes, scale = matrix(64, 32, seed=4)
    words, scales = marlin_from_codes(codes, scale)
    for kt in range(2):
        for lane in range(32):
            for j in range(4):
                n, k = 16 * j + lane // 4, 16 * kt + 2 * (lane % 4)
                v = [codes[n, k + d] for d in (0, 1, 8, 9)] + [codes[n + 8, k + d] for d in (0, 1, 8, 9)]
                want = 0
                for p, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                    want |= int(v[source]) << (4 * p)
                assert int(words[kt, lane * 4 + j]) & 0xFFFFFFFF == want
    for i in range(8):
        for j in range(8):
            assert scales[0, 8 * i + j] == scale[i + 8 * j, 0]


def test_marlin_fault_shows():
    codes, scale = matrix(64, 64, seed=5)
    words, scales = marlin_from_codes(codes, scale)
    words[1, 17] ^= 1 << 9
    assert int((codes_from_marlin(words, scales)[0] != codes).sum()) == 1
    with pytest.raises(ValueError, match="marlin"):
        marlin_from_codes(codes[:60], scale[:60])
