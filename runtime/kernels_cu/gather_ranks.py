"""Rows of all ranks side by side, through peer memory: the call of gather_ranks.cu, over the places that sample_ranks.cu has.

Run on the CPU shim by two to four processes, on two H200 (tools/results/draw_ranks_h200x2.jsonl), compiled for every architecture.
"""

from __future__ import annotations

from runtime.kernels_cu._call import Call, i32, ptr
from runtime.kernels_cu.all_reduce import seat_of
from runtime.kernels_cu.sample_ranks import PACKETS, Seat

SOURCE = "gather_ranks.cu"
ENTRIES = ("gather_ranks",)


def fits(seat: Seat, rows: int, row_bytes: int) -> bool:
    """Whether that many rows of a rank go in one launch: a block a row, 8 bytes a packet."""
    return 1 <= rows <= seat.config.blocks and row_bytes % 8 == 0 and 0 < row_bytes <= 8 * PACKETS


def call(seat: Seat, rows: int, row_bytes: int, *, x: int, out: int) -> Call:
    """out [rows, world, row_bytes] = every rank's x [rows, row_bytes]. Raises ValueError for what does not fit."""
    if not fits(seat, rows, row_bytes):
        raise ValueError(
            f"gather_ranks: {rows} rows of {row_bytes} bytes; 1 to {seat.config.blocks} rows of whole 8 bytes up to {8 * PACKETS} fit"
        )
    arguments = (ptr(x), ptr(out), i32(row_bytes // 8), seat_of("gather_ranks", seat.ranks, seat.config.world))
    return Call("gather_ranks", (rows, 1, 1), seat.config.threads, 0, arguments)
