"""Embedding, norms, gate, row copies and cache moves: the calls of dense.cu.

Grids are fixed for a bucket of M rows. seq [M] i32 in device memory says which rows are dead (-1), 0 means none is; a dead
row is neither read nor written. Addresses are of device memory, rows are contiguous unless a stride is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.cost import Cost
from runtime.hw import Hardware
from runtime.kernels_cu._call import Call, blocks, f32, i32, i64, ptr, vectors

SOURCE = "dense.cu"
ENTRIES = ("embed", "rms_norm", "add_rms_norm", "silu_mul", "copy_rows", "gather_rows", "kv_move")
SLICE = 128  # kSlice of dense.cu
MOVE_SMEM_BYTES = 48 << 10  # what a block may have without asking
_LAUNCH_US = 1.5  # an estimate until a record exists


@dataclass(frozen=True, slots=True)
class Config:
    """threads of a norm's block, and vecs: 16-byte vectors of a row that each keeps in registers."""

    threads: int = 512
    vecs: int = 2

    def check(self, hidden: int) -> None:
        """Raises ValueError with the broken rule."""
        row = vectors("rms_norm", "H", hidden)
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"{self}: {self.threads} threads; whole warps, at most 1024")
        if not 1 <= self.vecs <= 8 or self.threads * self.vecs < row:
            raise ValueError(f"{self}: room for {self.threads * self.vecs} vectors, a row of H = {hidden} has {row}")

    def smem_bytes(self) -> int:
        return 0

    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads, "VECS": self.vecs}


def candidates(hidden: int) -> list[Config]:
    """From a thread for each vector, least latency, to four vectors a thread, most rows at once; the default first."""
    row = vectors("rms_norm", "H", hidden)
    found: list[Config] = []
    for vecs in (1, 2, 4, 8):
        threads = 32 * blocks(blocks(row, vecs), 32)
        if threads <= 1024 and (threads >= 64 or not found):
            found.append(Config(threads, vecs))
    return found


def work(rows: int, hidden: int, arrays: int) -> Cost:
    """What a row op pays: every array once, nothing twice."""
    return Cost(5.0 * rows * hidden, 2.0 * rows * hidden * (arrays - 1), 2.0 * rows * hidden)


def predict_us(rows: int, hidden: int, arrays: int, hw: Hardware) -> float:
    """A launch, or the traffic where that is longer."""
    return max(_LAUNCH_US, work(rows, hidden, arrays).floor_us(hw))


def embed(config: Config, m: int, hidden: int, rows: int, first: int, *, token: int, table: int, out: int, seq: int = 0) -> Call:
    """out [M, H] = table [rows, H] at token [M] - first, zeros where another rank has the row."""
    numbers = (i32(first), i32(rows), i32(vectors("embed", "H", hidden)))
    return Call("embed", (m, 1, 1), config.threads, 0, (ptr(token), ptr(table), ptr(seq), ptr(out), *numbers))


def rms_norm(config: Config, m: int, hidden: int, eps: float, *, x: int, w: int, out: int, seq: int = 0) -> Call:
    """out [M, H] = x rsqrt(mean x^2 + eps) w."""
    config.check(hidden)
    numbers = (i32(vectors("rms_norm", "H", hidden)), f32(eps))
    return Call("rms_norm", (m, 1, 1), config.threads, 0, (ptr(x), ptr(w), ptr(seq), ptr(out), *numbers))


def add_rms_norm(config: Config, m: int, hidden: int, eps: float, *, x: int, delta: int, w: int, out: int, seq: int = 0) -> Call:
    """x [M, H] += delta, then as rms_norm."""
    config.check(hidden)
    numbers = (i32(vectors("add_rms_norm", "H", hidden)), f32(eps))
    return Call("add_rms_norm", (m, 1, 1), config.threads, 0, (ptr(x), ptr(delta), ptr(w), ptr(seq), ptr(out), *numbers))


def silu_mul(m: int, width: int, *, x: int, out: int, seq: int = 0) -> Call:
    """out [M, F] = silu(x[:, :F]) x[:, F:], x [M, 2 F]; width is F."""
    row = vectors("silu_mul", "F", width)
    return Call("silu_mul", (blocks(row, SLICE), m, 1), SLICE, 0, (ptr(x), ptr(seq), ptr(out), i32(row)))


def copy(m: int, hidden: int, *, x: int, out: int, out_stride_bytes: int, x_stride_bytes: int = 0, seq: int = 0) -> Call:
    """out [M, H] = x; x_stride_bytes 0: contiguous."""
    row = vectors("copy", "H", hidden)
    strides = (i64(x_stride_bytes or 16 * row), i64(out_stride_bytes))
    return Call("copy_rows", (blocks(row, SLICE), m, 1), SLICE, 0, (ptr(x), ptr(seq), ptr(out), *strides, i32(row)))


def gather_rows(n: int, hidden: int, *, x: int, rows: int, live: int, out: int) -> Call:
    """out[i] = x[rows[i]] for the i below *live, of n in the bucket."""
    row = vectors("gather_rows", "H", hidden)
    return Call(
        "gather_rows",
        (blocks(row, SLICE), n, 1),
        SLICE,
        0,
        (ptr(x), ptr(rows), ptr(live), ptr(out), i64(16 * row), i64(16 * row), i32(row)),
    )


def move_width(row: int, most_moves: int) -> int:
    """Vectors of a row that a block of kv_move owns: the most, up to 4 (64 bytes), that divide it and fit; ValueError if none does."""
    for width in (4, 3, 2, 1):
        if row % width == 0 and 16 * width * most_moves <= MOVE_SMEM_BYTES:
            return width
    raise ValueError(f"kv_move: {most_moves} moves of 16 bytes exceed {MOVE_SMEM_BYTES} bytes of shared memory; split the step's moves")


def kv_move(layers: int, slots: int, row_bytes: int, most_moves: int, *, cache: int, moves: int, live: int) -> Call:
    """cache [Y, S, row_bytes]: every layer's rows `to` become its rows `from`, moves [n, 2] with n = *live <= most_moves.

    Moves may overlap; all reads come before all writes. No two moves may share a `to`.
    """
    row = vectors("kv_move", "C", row_bytes, 1)
    width = move_width(row, max(most_moves, 1))
    numbers = (i64(slots * row_bytes), i32(row), i32(width))
    return Call("kv_move", (row // width, layers, 1), SLICE, 16 * width * most_moves, (ptr(cache), ptr(moves), ptr(live), *numbers))
