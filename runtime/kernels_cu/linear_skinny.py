"""Products with at most 16 rows: the call of linear_skinny.cu, and what to build it as.

It serves `linear`, `linear_f32` and, with heads, the batched halves of `mla_query` and `mla_value`. A row's bits depend on N,
K and the configuration, not on M: give every bucket the same one and rows do not depend on their company. Above 16 rows
`linear_lt` describes the product for cuBLASLt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, blocks

SOURCE = "linear_skinny.cu"
ENTRIES = ("linear_skinny", "linear_skinny_f32")
CHUNK, FRAG_ROWS, FRAG, PAD_BYTES = 32, 16, 128, 64  # kChunk, rows of a warp, kFrag, kPad of linear_skinny.cu
MOST_ROWS = 16
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MAX_SMEM_BYTES = {"sm_80": 166_912, "sm_89": 101_376, "sm_90a": 232_448, "sm_100a": 232_448, "sm_120a": 101_376}
SM_SMEM_BYTES = {"sm_80": 167_936, "sm_89": 102_400, "sm_90a": 233_472, "sm_100a": 233_472, "sm_120a": 102_400}
_LAUNCH_US, _FLIGHT_US = 1.5, 1.0  # a launch; memory latency under load. Estimates until a record exists


class Params(ctypes.Structure):
    """`Params` of linear_skinny.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "x", "out", "part", "arrived", "seq")),
        *((name, ctypes.c_longlong) for name in ("x_row", "x_head", "out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("N", "K", "M", "splits")),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dims:
    """out [M, heads, N] = x [M, heads, K] w [heads, N, K]^T; strides in numbers from row to row and from head to head."""

    M: int
    N: int
    K: int
    x_row: int
    out_row: int
    heads: int = 1
    x_head: int = 0
    out_head: int = 0

    @staticmethod
    def plain(m: int, n: int, k: int) -> Dims:
        """Contiguous x [M, K] and out [M, N]."""
        return Dims(m, n, k, k, n)

    @staticmethod
    def absorb(m: int, heads: int, nope: int, rope: int, latent: int) -> Dims:
        """The first half of mla_query: q [M, A, N+R] and w_uk [A, L, N] to the first L of out [M, A, L+R]."""
        return Dims(m, latent, nope, heads * (nope + rope), heads * (latent + rope), heads, nope + rope, latent + rope)

    @staticmethod
    def value(m: int, heads: int, latent: int, width: int) -> Dims:
        """mla_value: u [M, A, L] and w_uv [A, U, L] to out [M, A*U]."""
        return Dims(m, width, latent, heads * latent, heads * width, heads, latent, width)

    def check(self) -> None:
        """Raises ValueError naming the symbol that the kernel cannot take."""
        if not 1 <= self.M <= MOST_ROWS:
            raise ValueError(f"linear_skinny: M = {self.M} is outside 1..{MOST_ROWS}; larger products are cuBLASLt's")
        for name, value, step in (("N", self.N, FRAG_ROWS), ("K", self.K, CHUNK), ("heads", self.heads, 1)):
            if value < step or value % step:
                raise ValueError(f"linear_skinny: {name} = {value} is not a positive multiple of {step}")
        for name, value in (("x_row", self.x_row), ("x_head", self.x_head)):
            if value % 8:
                raise ValueError(f"linear_skinny: {name} = {value}; rows of x must start at multiples of 16 bytes")

    @property
    def chunks(self) -> int:
        return self.K // CHUNK


@dataclass(frozen=True, slots=True)
class Config:
    """columns: rows of x that fit, 8 or 16. wn, wk: warps of a block along weight rows and along K. depth: chunks of 32 inputs
    of a batch; two batches are in registers. splits: blocks that share a tile's K."""

    columns: int = 16
    wn: int = 4
    wk: int = 2
    depth: int = 4
    splits: int = 1

    def defines(self) -> dict[str, int]:
        return {"NB": self.columns // 8, "WN": self.wn, "WK": self.wk, "DEPTH": self.depth}

    @property
    def threads(self) -> int:
        return 32 * self.wn * self.wk

    def tiles(self, dims: Dims) -> int:
        return blocks(dims.N, FRAG_ROWS * self.wn)

    def smem_bytes(self, dims: Dims) -> int:
        """The block's slice of x, then, in the same place, the sums of its warps along K."""
        slice_bytes = 2 * CHUNK * blocks(dims.chunks, self.splits) + PAD_BYTES
        meeting = 4 * self.wk * self.wn * self.columns // 8 * FRAG if self.wk > 1 else 0
        return max(self.columns * slice_bytes, meeting)

    def check(self, dims: Dims, arch: str = "sm_90a") -> None:
        """Raises ValueError with the broken rule."""
        dims.check()
        if self.columns not in (8, 16) or self.columns < dims.M:
            raise ValueError(f"{self}: 8 or 16 columns, and at least M = {dims.M}")
        if self.wn < 1 or self.wk < 1 or self.wn * self.wk > 16 or not 1 <= self.depth <= 8:
            raise ValueError(f"{self}: wn wk warps must be 1..16, depth 1..8")
        if not 1 <= self.splits * self.wk <= dims.chunks:
            raise ValueError(f"{self}: {self.splits} splits of {self.wk} warps, but K = {dims.K} has {dims.chunks} chunks of {CHUNK}")
        if self.smem_bytes(dims) > MAX_SMEM_BYTES[arch]:
            raise ValueError(f"{self}: {self.smem_bytes(dims)} bytes of shared memory, {MAX_SMEM_BYTES[arch]} fit on {arch}; more splits")

    def fits(self, dims: Dims, arch: str = "sm_90a") -> bool:
        try:
            self.check(dims, arch)
        except ValueError:
            return False
        return True


def workspace_bytes(dims: Dims, config: Config) -> dict[str, int]:
    """Bytes of the scratch arrays. arrived must be zero before the first call, and is zero after each."""
    tiles = dims.heads * config.tiles(dims)
    fragments = tiles * config.splits * config.wn * config.columns // 8
    return {"part": 4 * FRAG * fragments if config.splits > 1 else 16, "arrived": 4 * tiles}


def candidates(dims: Dims, arch: str = "sm_90a") -> list[Config]:
    """Legal configurations: every shape of a block; splits of K so that blocks come in whole waves of some card."""
    columns = 8 if dims.M <= 8 else 16
    shapes = [(wn, wk, depth) for wn, wk in ((8, 1), (4, 2), (2, 4), (1, 8), (4, 1), (2, 2)) for depth in (4, 2)]
    every = [Config(columns, *shape, splits) for shape in shapes for splits in SPLITS]
    return [config for config in every if config.fits(dims, arch)]


def work(dims: Dims, config: Config) -> Cost:
    """What this implementation moves: weights once, x once for each tile, partial sums out and in."""
    weights = 2.0 * dims.heads * dims.N * dims.K
    x = 2.0 * dims.heads * dims.M * dims.K * config.tiles(dims)
    parts = float(workspace_bytes(dims, config)["part"]) if config.splits > 1 else 0.0
    return Cost(2.0 * dims.heads * config.columns * dims.N * dims.K, weights + x + parts, parts + 2.0 * dims.M * dims.N * dims.heads)


def predict_us(dims: Dims, config: Config, hw: Hardware, sms: int = 132, arch: str = "sm_90a") -> float:
    """A launch, then waves of blocks, each as long as its bytes take: at the SM's share of bandwidth, or one latency a batch."""
    grid = config.tiles(dims) * config.splits * dims.heads
    registers = 16 * 2 * config.depth + 60
    resident = max(1, min(SM_SMEM_BYTES[arch] // (config.smem_bytes(dims) + 1024), 65_536 // (registers * config.threads), 16))
    waves = blocks(grid, resident * sms)
    batches = blocks(blocks(dims.chunks, config.splits * config.wk), config.depth)
    block_bytes = work(dims, config).bytes / grid
    per_wave = max(min(resident, blocks(grid, sms)) * block_bytes * sms / hw.read_bps * 1e6, (batches + 1) / 2 * _FLIGHT_US)
    return _LAUNCH_US + waves * per_wave


def default_config(dims: Dims, hw: Hardware, arch: str = "sm_90a") -> Config:
    """One choice for all M of an (N, K): the candidate that `predict_us` likes best at 16 rows, with the columns that M needs.

    So a row has the same bits in every bucket. A tuned record, once there is one, comes before it.
    """
    most = replace(dims, M=MOST_ROWS)
    found = candidates(most, arch)
    if not found:
        raise ValueError(f"linear_skinny: no configuration fits {most} on {arch}; K = {dims.K} may be too long for 16 splits")
    return widened(min(found, key=lambda config: predict_us(most, config, hw, arch=arch)), dims.M)


def widened(config: Config, m: int) -> Config:
    """The same configuration with the columns that M rows need."""
    return replace(config, columns=8 if m <= 8 else 16)


def takes(dims: Dims) -> bool:
    """Whether it is for this kernel: few rows, and sizes that need no padding (a router of 8 experts would)."""
    return dims.M <= MOST_ROWS and dims.N % FRAG_ROWS == 0 and dims.K % CHUNK == 0


def call(config: Config, dims: Dims, at: Mapping[str, int], float_out: bool = False) -> Call:
    """The launch. at: addresses by name: w, x, out, part, arrived, and seq (0: no row is dead). float_out: out is float32."""
    config.check(dims)
    strides = (dims.x_row, dims.x_head, dims.out_row, dims.out_head)
    pointers = (at[name] for name in ("w", "x", "out", "part", "arrived", "seq"))
    params = Params(*pointers, *strides, dims.N, dims.K, dims.M, config.splits)
    grid = (config.tiles(dims), config.splits, dims.heads)
    return Call(ENTRIES[int(float_out)], grid, config.threads, config.smem_bytes(dims), (params,))
