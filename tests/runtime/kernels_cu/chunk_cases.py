"""Steps that mix long chunks with trees, single rows and dead rows, and what the definition says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from runtime.kernels_cu.chunk_attention import Dims
from runtime.kernels_np import chunks
from tests.plans import make_plan, page_table, random_parents
from tests.shim_calls import bf16

SCALE = 0.1447
NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128
UNTOUCHED = 776.0  # what rows hold that nobody should write


@dataclass
class Step:
    """Arrays by the ops' names. Rows and sequences beyond the live ones are dead; what must not be read is NaN."""

    dims: Dims
    least: int
    q: np.ndarray  # [M, A*192]
    absorbed: np.ndarray  # [M, A, 576]
    cache: np.ndarray
    w_uk: np.ndarray
    w_uv: np.ndarray
    pages: np.ndarray
    ctx: np.ndarray
    row0: np.ndarray
    seq: np.ndarray
    pos: np.ndarray

    def split(self) -> np.ndarray:
        """`rest` of the definition: [M] i32."""
        rest = np.full(self.dims.M, -7, np.int32)
        chunks.split_chunks(self.seq, self.pos, self.ctx, self.row0, self.least, self.dims.room, rest=rest)
        return rest

    def reference(self, rest: np.ndarray) -> np.ndarray:
        """[M, A*128] f32; UNTOUCHED where a row is not taken."""
        value = np.full((self.dims.M, self.dims.heads * VALUE), UNTOUCHED, bf16)
        weights = (w.astype(np.float32) for w in (self.w_uk, self.w_uv))
        given = (self.pages, self.dims.page_size, self.ctx, self.row0, self.seq, rest, SCALE)
        with np.errstate(invalid="ignore"):
            chunks.chunk_attention(self.q, self.absorbed, self.cache, *weights, *given, value)
        return value.astype(np.float32)


def make_step(
    heads: int,
    rows: list[int],
    ctx: list[int],
    trees: tuple[int, ...] = (),
    page: int = 64,
    least: int = 8,
    room: int = 1024,
    bucket: int = 0,
    sequences: int = 0,
    seed: int = 0,
) -> Step:
    """rows[b] nodes after ctx[b] committed keys, a chain unless b is of `trees`; bucket and sequences pad with what is dead.

    Pages are shuffled; every other tile of keys is twice as loud, so that maxima move. The null page, every slot that holds no key,
    and what rows that are not taken hold is NaN.
    """
    rng = np.random.default_rng(seed)
    parents = [random_parents(rng, n) if b in trees else [-1, *range(n - 1)] for b, n in enumerate(rows)]
    longest = max(n + c for n, c in zip(rows, ctx, strict=True))
    pages = page_table(len(rows), -(-longest // page), rng)
    plan = make_plan([[0] * n for n in rows], parents, ctx, pages, page)
    m, b = max(bucket, plan.m), max(sequences, len(rows))
    cache = np.full(((pages.max() + 2) * page, LATENT + ROPE), np.nan, np.float32)
    for s, (n, c) in enumerate(zip(rows, ctx, strict=True)):
        used = np.arange(n + c)
        cache[pages[s][used // page] * page + used % page] = rng.standard_normal((n + c, LATENT + ROPE)) * (1 + used // 128 % 2)[:, None]
    pad = lambda a, n, value: np.concatenate([a, np.full((n - len(a), *a.shape[1:]), value, a.dtype)])  # noqa: E731
    step = Step(
        Dims(m, heads, len(cache), page, pages.shape[1], room),
        least,
        rng.standard_normal((m, heads, NOPE + ROPE)).astype(np.float32),
        np.full((m, heads, LATENT + ROPE), np.nan, np.float32),
        cache.astype(bf16),
        (rng.standard_normal((heads, LATENT, NOPE)) * LATENT**-0.5).astype(bf16),
        (rng.standard_normal((heads, VALUE, LATENT)) * LATENT**-0.5).astype(bf16),
        pad(plan.pages, b, 0),
        pad(plan.ctx, b, 0),
        pad(plan.row0, b, 0),
        pad(plan.seq, m, -1),
        pad(plan.pos, m, 0),
    )
    # A few rows are twice as loud: their scores differ by tens, so that maxima move. At five times, one key element that rounds the
    # other way moves a score by 0.034, and with two keys almost equal the result by 2.4 tolerances (seen once in 2 M elements).
    louder = 1 + (rng.random((m, heads, 1)) > 0.8)
    step.q *= louder
    step.absorbed[:, :, LATENT:] = rng.standard_normal((m, heads, ROPE)) * louder
    step.q[:, :, NOPE:] = np.nan  # the unrotated part, which nobody reads
    for a in (step.q, step.absorbed):
        a[step.split() != -1] = np.nan
        a[step.seq < 0] = np.nan
    return replace(step, q=step.q.reshape(m, -1).astype(bf16), absorbed=step.absorbed.astype(bf16))
