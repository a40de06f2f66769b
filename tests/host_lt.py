"""cuBLASLt's stand-in without a GPU: the same calls, products of host memory in float32 by NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from runtime.kernels_cu.linear_lt import OP_N, OP_T, R_16BF, Layout, Product

KIND = {14: np.dtype(ml_dtypes.bfloat16), 0: np.dtype(np.float32)}
PLAIN, SPLIT, RAGGED = (name.encode().ljust(64, b"\0") for name in ("plain", "split", "ragged"))
NAMES = {PLAIN: "plain", SPLIT: "split", RAGGED: "ragged"}


def view(address: int, layout: Layout, batch: int) -> np.ndarray:
    """[batch, rows, cols] of host memory, as the layout says."""
    item = KIND[layout.kind].itemsize
    numbers = (batch - 1) * layout.batch_stride + (layout.cols - 1) * layout.ld + layout.rows
    flat = np.frombuffer((ctypes.c_char * (numbers * item)).from_address(address), KIND[layout.kind])
    steps = tuple(item * s for s in (layout.batch_stride, 1, layout.ld))
    return np.lib.stride_tricks.as_strided(flat, (batch, layout.rows, layout.cols), steps)


class HostLt:
    """A `linear_lt.Library`. Algorithms: plain; split, which sums K in two halves; ragged, whose order of K depends on M.

    offered: what `suggest` returns, in that order. few: the most rows that plain takes.
    """

    version = 130002

    def __init__(self, offered: tuple[bytes, ...] = (SPLIT, RAGGED, PLAIN), few: int = 1 << 30) -> None:
        self.offered, self.few = offered, few
        self.asked = 0

    def open(self, product: Product, alignment: tuple[int, int, int]) -> Product:
        assert (product.op_a, product.op_b, product.a.kind, product.b.kind) == (OP_T, OP_N, R_16BF, R_16BF)
        assert all(size > 0 and size & (size - 1) == 0 for size in alignment)
        return product

    def suggest(self, problem: Product, most: int, workspace_bytes: int, split_k: bool) -> list[bytes]:
        self.asked += 1
        return [algo for algo in self.offered if split_k or algo != SPLIT][:most]

    def workspace_bytes(self, problem: Product, algo: bytes) -> int | None:
        return None if algo not in NAMES or (algo == PLAIN and problem.b.cols > self.few) else 0

    def describe(self, algo: bytes) -> str:
        return NAMES[algo]

    def multiplier(
        self, problem: Product, algo: bytes, a: int, b: int, d: int, workspace: int, workspace_bytes: int
    ) -> Callable[[int], None]:
        def run(stream: int) -> None:
            w, x, out = (view(at, layout, problem.batch) for at, layout in ((a, problem.a), (b, problem.b), (d, problem.d)))
            out[...] = order_of(algo, problem)(w.astype(np.float32), x.astype(np.float32)).astype(out.dtype)

        return run


def order_of(algo: bytes, problem: Product) -> Any:
    """The product [batch, N, M] of w [batch, K, N] and x [batch, K, M], K summed from the front, by halves, or from place M on.

    A sum over one K after the other has the same bits for a row at any M, which a BLAS call would not.
    """
    k = problem.a.rows
    order = np.roll(np.arange(k), -problem.b.cols) if algo == RAGGED else np.arange(k)

    def multiply(w: np.ndarray, x: np.ndarray) -> np.ndarray:
        total = np.zeros((problem.batch, problem.a.cols, problem.b.cols), np.float32)
        halves = np.array_split(order, 2) if algo == SPLIT else [order]
        for half in halves:
            part = np.zeros_like(total)
            for i in half:
                part += w[:, i, :, None] * x[:, i, None, :]
            total += part
        return total

    return multiply
