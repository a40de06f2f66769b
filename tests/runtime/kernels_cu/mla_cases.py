"""Batches for the attention kernel's tests: random trees and chains over a shuffled page table, with everything that must not
be read set to NaN, and the definition's answer."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from runtime.kernels_cu.tree_mla_config import Dims
from runtime.kernels_np import mla
from tests.plans import make_plan, page_table, random_parents

bf16 = ml_dtypes.bfloat16
SCALE = 0.1447
WIDTH, VALUE = 576, 512


@dataclass
class Batch:
    """Arrays of one call by the op's names; rows and sequences beyond the live ones are dead."""

    dims: Dims
    q: np.ndarray
    cache: np.ndarray
    pages: np.ndarray
    ctx: np.ndarray
    row0: np.ndarray
    seq: np.ndarray
    pos: np.ndarray
    slot: np.ndarray
    ancestors: np.ndarray

    def reference(self) -> np.ndarray:
        """[M, A, 512] f32 of the definition; NaN where a row is dead."""
        live = int((self.seq >= 0).sum())
        out = np.full((len(self.q), self.dims.heads, VALUE), np.nan, np.float32)
        part = [a[:live] for a in (self.seq, self.pos, self.slot, self.ancestors)]
        with np.errstate(invalid="ignore"):
            mla.tree_mla(self.q[:live], self.cache, self.pages, self.dims.page_size, self.ctx, self.row0, *part, SCALE, out=out[:live])
        return out


def make_batch(
    heads: int,
    rows: list[int],
    ctx: list[int],
    page: int = 64,
    seed: int = 0,
    chain: bool = False,
    bucket: int | None = None,
    sequences: int | None = None,
    spread: float = 0.25,
) -> Batch:
    """rows[b] nodes after ctx[b] committed keys; bucket and sequences pad with dead rows and empty sequences.

    Pages are shuffled; the null page and every slot that holds no key are NaN, so is q of dead rows. The columns of q have
    a few large numbers, so that scores differ by tens and the running maximum moves.
    """
    rng = np.random.default_rng(seed)
    parents = [[-1, *range(n - 1)] if chain else list(random_parents(rng, n)) for n in rows]
    longest = max(n + c for n, c in zip(rows, ctx, strict=True))
    pages = page_table(len(rows), -(-longest // page), rng)
    plan = make_plan([[0] * n for n in rows], parents, ctx, pages, page)
    m, b = bucket or plan.m, sequences or len(rows)
    cache = np.full(((pages.max() + 2) * page, WIDTH), np.nan, np.float32)
    for s, (n, c) in enumerate(zip(rows, ctx, strict=True)):
        used = np.arange(n + c)
        cache[pages[s][used // page] * page + used % page] = rng.standard_normal((n + c, WIDTH))
    q = np.full((m, heads, WIDTH), np.nan, np.float32)
    q[: plan.m] = rng.standard_normal((plan.m, heads, WIDTH)) * spread * (1 + 4 * (rng.random((plan.m, heads, 1)) > 0.8))
    pad = lambda a, n, value: np.concatenate([a, np.full((n - len(a), *a.shape[1:]), value, a.dtype)])  # noqa: E731
    dims = Dims(m, b, heads, pages.shape[1] * page, page, plan.ancestors.shape[1])
    return Batch(
        dims,
        q.astype(bf16),
        cache.astype(bf16),
        pad(plan.pages, b, 0),
        pad(plan.ctx, b, 0),
        pad(plan.row0, b, 0),
        pad(plan.seq, m, -1),
        pad(plan.pos, m, 0),
        pad(plan.slot, m, 0),
        pad(plan.ancestors, m, 0xFFFFFFFFFFFFFFFF),
    )
