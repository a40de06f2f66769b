"""INT4 weights between the orders they come in and the packed layout of `runtime.w4`.

    compressed-tensors triple  <->  codes and scales  <->  W4
                                          ^
                                          v
                               Marlin's tile order

Every arrow is an exact inverse: no bit of a code or scale is lost, whichever way it is walked. Codes are u = q + 8.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from runtime.source import Triple, W4Source
from runtime.w4 import GROUP, W4, pack, unpack_expert

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
Array = NDArray[Any]

bfloat16 = ml_dtypes.bfloat16
CODES_PER_WORD = 8

# Marlin: nibble p of a word holds input 16 kt + 2 (lane % 4) + DK[p] of output 64 nt + 16 j + lane / 4 + DN[p].
_DK = np.array([0, 8, 0, 8, 1, 9, 1, 9])
_DN = np.array([0, 0, 8, 8, 0, 0, 8, 8])


def codes_from_triple(weight_packed: Array, weight_scale: Array, weight_shape: Array) -> tuple[U8, Array]:
    """One linear's compressed-tensors triple -> (codes [N, K] u8, scale [N, K/32] bf16).

    weight_packed: [N, K/8] i32, eight consecutive inputs a word, the first in the lowest nibble; weight_scale:
    [N, K/32] bf16; weight_shape: [2] = (N, K). Raises ValueError where the three disagree.
    """
    n, k = (int(d) for d in np.asarray(weight_shape).reshape(-1))
    if weight_packed.dtype != np.int32 or tuple(weight_packed.shape) != (n, k // CODES_PER_WORD) or k % GROUP:
        raise ValueError(
            f"weight_packed is {weight_packed.dtype} {weight_packed.shape}; weight_shape ({n}, {k}) needs int32 "
            f"{(n, k // CODES_PER_WORD)} and K % {GROUP} = 0"
        )
    if weight_scale.dtype != bfloat16 or tuple(weight_scale.shape) != (n, k // GROUP):
        raise ValueError(
            f"weight_scale is {weight_scale.dtype} {weight_scale.shape}; weight_shape ({n}, {k}) needs bfloat16 {(n, k // GROUP)}"
        )
    return unpack_words(weight_packed), weight_scale


def triple_from_codes(codes: Array, scale: Array) -> tuple[I32, Array, Array]:
    """The inverse of `codes_from_triple`: (weight_packed [N, K/8] i32, weight_scale, weight_shape [2] i32)."""
    return pack_words(codes), scale, np.array(codes.shape, np.int32)


def unpack_words(words: Array) -> U8:
    """int32 [..., n] -> codes u8 [..., 8 n], lowest nibble first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32(15)
    return nibbles.astype(np.uint8).reshape(*words.shape[:-1], -1)


def pack_words(codes: Array) -> I32:
    """Codes u8 [..., 8 n] -> int32 [..., n], lowest nibble first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = codes.reshape(*codes.shape[:-1], -1, CODES_PER_WORD).astype(np.uint32)
    words: I32 = np.bitwise_or.reduce(nibbles << shifts, axis=-1).astype(np.uint32).view(np.int32)
    return words


def w4_from_experts(experts: list[tuple[Array, Array]], interleaved: bool = False) -> W4:
    """Packs one (codes [N, K] u8, scale [N, K/32] bf16) pair an expert, all of one shape."""
    shapes = {(c.shape, s.shape) for c, s in experts}
    if len(shapes) != 1:
        raise ValueError(f"experts differ in shape: {sorted(map(str, shapes))}")
    return pack(np.stack([c for c, _ in experts]), np.stack([s for _, s in experts]), interleaved)


def w4_from_gate_up(gate: list[tuple[Array, Array]], up: list[tuple[Array, Array]]) -> W4:
    """Packs gate and up [F, K] pairs of each expert as one interleaved matrix [2 F, K]."""
    if len(gate) != len(up):
        raise ValueError(f"{len(gate)} gate matrices, {len(up)} up matrices")
    both = [(np.concatenate([g, u]), np.concatenate([gs, us])) for (g, gs), (u, us) in zip(gate, up, strict=True)]
    return w4_from_experts(both, interleaved=True)


def w4_source(experts: list[tuple[Triple, ...]]) -> W4Source:
    """Experts of one triple each, or of two, gate and up: packed here when asked, or by a device from the triples themselves."""

    def pack_here() -> W4:
        read = [[read_triple(t) for t in parts] for parts in experts]
        if len(experts[0]) == 2:
            return w4_from_gate_up([gate for gate, _ in read], [up for _, up in read])
        return w4_from_experts([one for (one,) in read])

    return W4Source(tuple(experts), pack_here)


def read_triple(triple: Triple) -> tuple[U8, Array]:
    """(codes [N, K] u8, scale [N, K/32] bf16) of a source."""
    return unpack_words(triple.words.read()), triple.scale.read()


def triple_from_w4(w: W4, expert: int) -> tuple[I32, Array, Array]:
    """One expert of a W4 as a compressed-tensors triple, rows in natural order."""
    return triple_from_codes(*unpack_expert(w, expert))


def marlin_from_codes(codes: Array, scale: Array) -> tuple[I32, Array]:
    """Marlin's order of one matrix: (words [K/16, 2 N] i32, scales [K/32, N] bf16).

    codes: [N, K] u8 (N % 64 = 0, K % 32 = 0), scale: [N, K/32] bf16. A 16 (K) x 64 (N) tile is 128 words; a lane's
    16 bytes are its B fragments of the tile. Scales are permuted inside each 64 columns: new[8 i + j] = old[i + 8 j].
    Source: arXiv 2408.11743, and the order that vLLM 0.33.0 repacks to.
    """
    n, k = codes.shape
    _check_marlin(n, k)
    kk, nn = _marlin_index(k, n)
    nibbles = codes.T[kk, nn].astype(np.uint32)  # [K/16, N/64, lane, j, p]
    words = np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).astype(np.uint32).view(np.int32)
    turned = scale.T.reshape(k // GROUP, n // 64, 8, 8)  # [.., j, i]
    return words.reshape(k // 16, 2 * n), np.ascontiguousarray(turned.swapaxes(2, 3)).reshape(k // GROUP, n)


def codes_from_marlin(words: Array, scales: Array) -> tuple[U8, Array]:
    """The inverse of `marlin_from_codes`: (codes [N, K] u8, scale [N, K/32] bf16)."""
    k, n = 16 * words.shape[0], words.shape[1] // 2
    _check_marlin(n, k)
    if tuple(scales.shape) != (k // GROUP, n):
        raise ValueError(f"marlin scales are {scales.shape}; words {words.shape} need {(k // GROUP, n)}")
    kk, nn = _marlin_index(k, n)
    codes = np.empty((k, n), np.uint8)
    codes[kk, nn] = unpack_words(words).reshape(kk.shape)
    turned = scales.reshape(k // GROUP, n // 64, 8, 8).swapaxes(2, 3)
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(turned.reshape(k // GROUP, n).T)


def _check_marlin(n: int, k: int) -> None:
    if n % 64 or k % GROUP:
        raise ValueError(f"marlin order needs N % 64 = 0 and K % {GROUP} = 0, got N = {n}, K = {k}")


def _marlin_index(k: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Input and output index of every nibble, both [K/16, N/64, 32, 4, 8]."""
    kt = np.arange(k // 16).reshape(-1, 1, 1, 1, 1)
    nt = np.arange(n // 64).reshape(1, -1, 1, 1, 1)
    lane = np.arange(32).reshape(1, 1, -1, 1, 1)
    word = np.arange(4).reshape(1, 1, 1, -1, 1)
    kk = 16 * kt + 2 * (lane % 4) + _DK
    nn = 64 * nt + 16 * word + lane // 4 + _DN
    shape = (k // 16, n // 64, 32, 4, 8)
    return np.broadcast_to(kk, shape), np.broadcast_to(nn, shape)
