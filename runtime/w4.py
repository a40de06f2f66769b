"""INT4 weights, group 32, in the one packed layout: the bytes that the GPU streams.

A weight is (u - 8) * s with a code u in 0..15 and one bf16 scale s for 32 consecutive inputs of a row.

The atom is a *unit* of 64 rows x 32 inputs, 1152 bytes: 1024 bytes of codes, then 128 bytes of scales (0.5625 bytes a
weight). Units of one 64-row strip follow each other along K, strips along N, experts last: `data [E, N/64, K/32, 1152]`.
So any run of K groups of a strip is one contiguous block, which a pipeline stage fetches by one bulk copy; a stage of
256 rows takes four. No shape needs padding: N % 64 = 0 and K % 32 = 0 are enough for every tensor-parallel shard.

Inside a unit, with row 16 j + 8 half + g and input 16 s + 8 h + 2 c + p (all indices from zero):

    codes   byte 512 (j / 2) + 16 (4 g + c) + 4 (2 (j % 2) + s) + 2 p + h, low nibble half 0, high nibble half 1
    scales  bf16 number 8 g + 2 j + half of the last 128 bytes

A 32-bit word is then one lane's (4 g + c) share of the m16n8k16 A fragment of rows 16 j .. 16 j + 15, k step s: nibble
i + 4 p belongs to register i = half + 2 h. Masking with 0x000F000F and 0x00F000F0 gives registers 0 and 1 as bf16
*subnormals* u * 2**-133 and u * 2**-129, which one bf16 FMA turns into (u - 8) * s rounded once; a shift by 8 gives
registers 2 and 3. PTX ISA, "Matrix fragments for mma.m16n8k16".

Rows of a gate-up matrix are interleaved in eights (eight gate rows, the eight up rows of the same outputs), so that one
lane holds both operands of silu(gate) * up. `W4.interleaved` records it; `unpack` and `dequantise` undo it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Array = NDArray[Any]

GROUP = 32  # inputs that share a scale
UNIT_ROWS = 64
UNIT_CODE_BYTES = UNIT_ROWS * GROUP // 2
UNIT_SCALE_BYTES = UNIT_ROWS * 2
UNIT_BYTES = UNIT_CODE_BYTES + UNIT_SCALE_BYTES
INTERLEAVE_ROWS = 8  # gate rows, then as many up rows
ZERO_CODE = 8
# The kernels hold s * 2**(133 - exponent) in bf16, whose largest power is 2**127.
_FREE_EXPONENT = 127 - 133

bfloat16 = ml_dtypes.bfloat16


@dataclass(frozen=True, slots=True)
class W4:
    """E matrices [N, K] of INT4 weights in packed form.

    data: [E, N/64, K/32, 1152] u8, the layout of this module. interleaved: rows are [gate; up] outside and woven in
    eights inside. exponent: the kernels compute with weights * 2**-exponent and multiply sums by 2**exponent; 0 unless
    a scale reaches 2**-5.
    """

    E: int
    N: int
    K: int
    interleaved: bool
    exponent: int
    data: U8
    group: int = GROUP

    def __post_init__(self) -> None:
        check_dims(self.E, self.N, self.K, self.interleaved)
        want = (self.E, self.N // UNIT_ROWS, self.K // GROUP, UNIT_BYTES)
        if self.group != GROUP:
            raise ValueError(f"W4: group is {self.group}; this layout holds groups of {GROUP} only")
        if tuple(self.data.shape) != want or self.data.dtype != np.uint8:
            raise ValueError(f"W4: data is {self.data.dtype} {tuple(self.data.shape)}, E={self.E} N={self.N} K={self.K} needs uint8 {want}")

    @property
    def nbytes(self) -> int:
        """Bytes of all experts: codes and scales."""
        return self.E * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes that one expert's matrix costs to stream."""
        return expert_bytes(self.N, self.K)


def expert_bytes(n: int, k: int) -> int:
    """Bytes of one packed [n, k] matrix, codes and scales."""
    return (n // UNIT_ROWS) * (k // GROUP) * UNIT_BYTES


def check_dims(experts: int, n: int, k: int, interleaved: bool) -> None:
    """Raises ValueError unless [experts, n, k] can be packed."""
    if experts < 1:
        raise ValueError(f"W4: {experts} experts; at least one is needed")
    if n < UNIT_ROWS or n % UNIT_ROWS:
        raise ValueError(f"W4: N = {n} rows is not a positive multiple of {UNIT_ROWS}; pad or choose another shard")
    if k < GROUP or k % GROUP:
        raise ValueError(f"W4: K = {k} inputs is not a positive multiple of the group {GROUP}; pad or choose another shard")
    if interleaved and (n // 2) % INTERLEAVE_ROWS:
        raise ValueError(f"W4: N/2 = {n // 2} rows do not divide into blocks of {INTERLEAVE_ROWS} to interleave")


def pack(codes: Array, scale: Array, interleaved: bool = False) -> W4:
    """Packs codes and scales.

    codes: [E, N, K] u8 in 0..15, scale: [E, N, K/32] bf16, rows in natural order ([gate; up] where `interleaved`).
    Every bit of both survives: `unpack(pack(c, s)) == (c, s)`. Raises ValueError on a shape, dtype, code above 15 or
    a scale that is not finite.
    """
    if codes.ndim != 3 or codes.dtype != np.uint8:
        raise ValueError(f"pack: codes are {codes.dtype} {codes.shape}, expected uint8 [E, N, K]")
    experts, n, k = (int(d) for d in codes.shape)
    check_dims(experts, n, k, interleaved)
    if scale.dtype != bfloat16 or tuple(scale.shape) != (experts, n, k // GROUP):
        raise ValueError(f"pack: scale is {scale.dtype} {scale.shape}, codes {codes.shape} need bfloat16 {(experts, n, k // GROUP)}")
    if codes.max() > 15:
        raise ValueError(f"pack: a code is {int(codes.max())}; INT4 codes are 0..15")
    data = np.empty((experts, n // UNIT_ROWS, k // GROUP, UNIT_BYTES), np.uint8)
    for e in range(experts):  # one expert at a time keeps the temporaries small: 29 MB at N = 4096, K = 7168
        _pack_expert(data[e], _weave(codes[e]) if interleaved else codes[e], _weave(scale[e]) if interleaved else scale[e])
    return W4(experts, n, k, interleaved, scale_exponent(scale), data)


def scale_exponent(scale: Array) -> int:
    """The smallest exponent >= 0 for which max|scale| * 2**(133 - exponent) is a finite bf16."""
    largest = float(np.max(np.abs(scale.astype(np.float32))))
    if not np.isfinite(largest):
        raise ValueError("pack: a scale is not finite")
    if largest == 0.0:
        return 0
    power = int(np.frexp(largest)[1]) - 1  # largest lies in [2**power, 2**(power + 1))
    return max(0, power - _FREE_EXPONENT)


def unpack(w: W4) -> tuple[U8, Array]:
    """The exact inverse of `pack`: (codes [E, N, K] u8, scale [E, N, K/32] bf16), rows in natural order."""
    codes = np.empty((w.E, w.N, w.K), np.uint8)
    scale = np.empty((w.E, w.N, w.K // GROUP), bfloat16)
    for e in range(w.E):
        codes[e], scale[e] = unpack_expert(w, e)
    return codes, scale


def unpack_expert(w: W4, expert: int) -> tuple[U8, Array]:
    """(codes [N, K] u8, scale [N, K/32] bf16) of one expert, rows in natural order."""
    strips, groups = w.N // UNIT_ROWS, w.K // GROUP
    unit = w.data[expert]
    code = unit[..., :UNIT_CODE_BYTES].reshape(strips, groups, 2, 8, 4, 2, 2, 2, 2)  # [nb, kb, jb, g, c, jl, s, p, h]
    halves = np.stack([code & 15, code >> 4])  # [half, nb, kb, jb, g, c, jl, s, p, h]
    codes = halves.transpose(1, 3, 6, 0, 4, 2, 7, 9, 5, 8).reshape(w.N, w.K)  # [nb, jb, jl, half, g, kb, s, h, c, p]
    raw = np.ascontiguousarray(unit[..., UNIT_CODE_BYTES:]).view(bfloat16).reshape(strips, groups, 8, 4, 2)  # [nb, kb, g, j, half]
    scale = raw.transpose(0, 3, 4, 2, 1).reshape(w.N, groups)
    if w.interleaved:
        return _unweave(codes), _unweave(scale)
    return codes, scale


def dequantise(w: W4, expert: int) -> F32:
    """(u - 8) * s of one expert as float32 [N, K], rows in natural order ([gate; up] where interleaved). Exact."""
    if not 0 <= expert < w.E:
        raise ValueError(f"dequantise: expert {expert} is outside 0..{w.E - 1}")
    codes, scale = unpack_expert(w, expert)
    value = codes.astype(np.float32) - ZERO_CODE
    out: F32 = (value.reshape(w.N, -1, GROUP) * scale.astype(np.float32)[:, :, None]).reshape(w.N, w.K)
    return out


def _pack_expert(out: U8, codes: Array, scale: Array) -> None:
    """Writes one expert's units [N/64, K/32, 1152] from codes [N, K] and scale [N, K/32]."""
    strips, groups = out.shape[0], out.shape[1]
    c = codes.reshape(strips, 2, 2, 2, 8, groups, 2, 2, 4, 2)  # [nb, jb, jl, half, g, kb, s, h, c, p]
    both = c[:, :, :, 0] | (c[:, :, :, 1] << 4)  # [nb, jb, jl, g, kb, s, h, c, p]
    out[..., :UNIT_CODE_BYTES] = both.transpose(0, 4, 1, 3, 7, 2, 5, 8, 6).reshape(strips, groups, UNIT_CODE_BYTES)
    s = scale.reshape(strips, 4, 2, 8, groups).transpose(0, 4, 3, 1, 2)  # [nb, kb, g, j, half]
    out[..., UNIT_CODE_BYTES:] = np.ascontiguousarray(s).view(np.uint8).reshape(strips, groups, UNIT_SCALE_BYTES)


def _weave(rows: Array) -> Array:
    """[gate; up] rows -> eight gate, eight up, eight gate, …"""
    half = rows.shape[0] // 2
    return rows.reshape(2, half // INTERLEAVE_ROWS, INTERLEAVE_ROWS, -1).transpose(1, 0, 2, 3).reshape(rows.shape)


def _unweave(rows: Array) -> Array:
    half = rows.shape[0] // 2
    return rows.reshape(half // INTERLEAVE_ROWS, 2, INTERLEAVE_ROWS, -1).transpose(1, 0, 2, 3).reshape(rows.shape)
