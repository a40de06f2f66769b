"""What both product kernels are asked on the CPU shim. `run(config, dims, w, x, out, seq, times)` executes one of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.kernels_cu.linear_skinny import Dims
from runtime.kernels_np import dense as define
from runtime.kernels_np import mla
from runtime.ops import OPS
from tests.compare import check_bitwise, check_close
from tests.shim_calls import bf16, poisoned, random_bf16


def check_product(run: Any, rng: np.random.Generator, config: Any, m: int, n: int, k: int, kind: Any = bf16) -> None:
    """A plain product [m, n], twice over one workspace; row 1 is dead and NaN."""
    x, w, out = random_bf16(rng, m, k), random_bf16(rng, n, k, scale=k**-0.5), poisoned(m, n, dtype=kind)
    seq = np.zeros(m, np.int32)
    if m > 1:
        seq[1], x[1], out[1] = -1, np.nan, 777
    run(config, Dims.plain(m, n, k), w, x, out, seq, 2)
    want, live = np.full((m, n), 777, kind), seq >= 0
    part = np.zeros((int(live.sum()), n), kind)
    op = "linear" if kind is bf16 else "linear_f32"
    getattr(define, op)(x[live], w.astype(np.float32), out=part)
    want[live] = part
    check_close(out.astype(np.float32), want.astype(np.float32), OPS[op].tolerance, op)


def check_row_bits(run: Any, rng: np.random.Generator, wide: Any, alone: Any, n: int) -> None:
    """A row among sixteen and among three (built as `wide`), and alone (built as `alone`)."""
    x, w = random_bf16(rng, 16, 320), random_bf16(rng, n, 320)
    many, few, one = (poisoned(m, n, dtype=np.float32) for m in (16, 3, 1))
    run(wide, Dims.plain(16, n, 320), w, x, many)
    run(wide, Dims.plain(3, n, 320), w, np.ascontiguousarray(x[5:8]), few)
    run(alone, Dims.plain(1, n, 320), w, np.ascontiguousarray(x[6:7]), one)
    check_bitwise(few, many[5:8])
    check_bitwise(one, many[6:7])


def check_absorbing(run: Any, rng: np.random.Generator, config: Any) -> None:
    """The first half of mla_query: the rotated columns of the same buffer stay as they are; the last head's tile may hang over."""
    m, heads, nope, rope, latent = 3, 5, 64, 16, 48
    q, w_uk, out = random_bf16(rng, m, heads * (nope + rope)), random_bf16(rng, heads, latent, nope), poisoned(m, heads, latent + rope)
    run(config, Dims.absorb(m, heads, nope, rope, latent), w_uk, q, out)
    want = np.zeros_like(out)
    mla.mla_query(q, w_uk.astype(np.float32), np.zeros(m, np.int32), np.zeros((1, rope), np.float32), out=want)
    check_close(out[:, :, :latent].astype(np.float32), want[:, :, :latent].astype(np.float32), OPS["mla_query"].tolerance, "mla_query")
    assert np.isnan(out[:, :, latent:].astype(np.float32)).all()


def check_values(run: Any, rng: np.random.Generator, config: Any, latent: int, width: int) -> None:
    """mla_value: a slice of x and of the output for each head."""
    m, heads = 10, 3
    u, w_uv, out = random_bf16(rng, m, heads, latent), random_bf16(rng, heads, width, latent), poisoned(m, heads * width)
    run(config, Dims.value(m, heads, latent, width), w_uv, u, out)
    want = np.zeros_like(out)
    mla.mla_value(u, w_uv.astype(np.float32), out=want)
    check_close(out.astype(np.float32), want.astype(np.float32), OPS["mla_value"].tolerance, "mla_value")
