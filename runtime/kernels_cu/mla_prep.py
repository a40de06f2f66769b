"""Latent norms, rotation and cache write before attention: the calls of mla_prep.cu.

`mla_latent` is the op. `query_rope` is the second half of the op `mla_query`; the first, out[:, a, :L] = q_nope[:, a] w_uk[a]^T
for each head, is a batched product of `linear_skinny` (to 16 rows) or cuBLASLt. They write disjoint columns of one buffer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, blocks, vectors

SOURCE = "mla_prep.cu"
ENTRIES = ("mla_latent", "query_rope")
SLICE = 128  # kSlice of mla_prep.cu
_LAUNCH_US = 1.5  # an estimate until a record exists


class Latent(ctypes.Structure):
    """`Latent` of mla_prep.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "q_norm", "kv_norm", "cos_sin", "pos", "slot", "seq", "q_latent", "cache")),
        *((name, ctypes.c_int) for name in ("Q", "L", "R")), ("eps", ctypes.c_float),
    ]  # fmt: skip


class Query(ctypes.Structure):
    """`Query` of mla_prep.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "cos_sin", "pos", "seq", "out")),
        *((name, ctypes.c_int) for name in ("heads", "N", "L", "R")),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dims:
    """M rows of a bucket, A heads on this rank, Q query rank, L latent, R rotary, N unrotated part of a head."""

    M: int
    A: int
    Q: int
    L: int
    R: int
    N: int

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernels cannot take."""
        for name in ("Q", "L", "R", "N"):
            vectors("mla_prep", name, getattr(self, name))
        if self.M < 1 or self.A < 1:
            raise ValueError(f"mla_prep: M = {self.M}, A = {self.A}; both must be at least 1")

    @property
    def row(self) -> int:
        """16-byte vectors of a row of the down-projection."""
        return (self.Q + self.L + self.R) // 8


@dataclass(frozen=True, slots=True)
class Config:
    """threads of mla_latent's block, and vecs: 16-byte vectors of a row that each keeps. Kimi: 264 vectors, 288 threads."""

    threads: int = 288
    vecs: int = 1

    def check(self, dims: Dims) -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"{self}: {self.threads} threads; whole warps, at most 1024")
        if not 1 <= self.vecs <= 8 or self.threads * self.vecs < dims.row:
            raise ValueError(f"{self}: room for {self.threads * self.vecs} vectors, a row has {dims.row}")

    def smem_bytes(self) -> int:
        return 0

    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads, "VECS": self.vecs}


def candidates(dims: Dims) -> list[Config]:
    """A thread for each vector of a row, or for two; the first is the default."""
    sizes = [(32 * blocks(blocks(dims.row, vecs), 32), vecs) for vecs in (1, 2, 4, 8)]
    return [Config(threads, vecs) for threads, vecs in sizes if threads <= 1024][:2]


def work(dims: Dims) -> Cost:
    """What both kernels pay: every number once."""
    latent, query = dims.M * 8 * dims.row, dims.M * dims.A * dims.R
    return Cost(5.0 * (latent + query), 2.0 * (latent + query), 2.0 * (latent + query))


def predict_us(dims: Dims, hw: Hardware) -> float:
    """Two launches, or the traffic where that is longer."""
    return max(2 * _LAUNCH_US, work(dims).floor_us(hw))


def mla_latent(
    config: Config, dims: Dims, eps: float, *, a: int, q_norm: int, kv_norm: int, cos_sin: int, pos: int, slot: int, q_latent: int,
    cache: int, seq: int = 0
) -> Call:  # fmt: skip
    """q_latent [M, Q] and cache[slot] from a [M, Q+L+R]; addresses of device memory, seq 0: no row is dead."""
    config.check(dims)
    sizes = (dims.Q // 8, dims.L // 8, dims.R // 8)
    params = Latent(a, q_norm, kv_norm, cos_sin, pos, slot, seq, q_latent, cache, *sizes, eps)
    return Call("mla_latent", (dims.M, 1, 1), config.threads, 0, (params,))


def query_rope(dims: Dims, *, q: int, cos_sin: int, pos: int, out: int, seq: int = 0) -> Call:
    """The last R numbers of every head of out [M, A, L+R] from those of q [M, A, N+R]."""
    dims.check()
    params = Query(q, cos_sin, pos, seq, out, dims.A, dims.N // 8, dims.L // 8, dims.R // 8)
    return Call("query_rope", (blocks(dims.A * dims.R // 8, SLICE), dims.M, 1), SLICE, 0, (params,))
