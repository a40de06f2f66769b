"""The op vocabulary: every operation of the model, once, with what it means and what it must cost.

A backend is an object with a method for each name in `OPS`: inputs in the order of the signature,
outputs as keyword arguments, written in place and never allocated, so that a model's forward is
legal while a graph is being captured. `kernels_np` defines an op, `null` counts it, `kernels_cu`
launches it; a parity test compares the three vocabularies.

`cost` is what any implementation must move and compute (the roofline's denominator), with every
operand read or written once. bf16 is 2 bytes; a W4 weight is 0.5 + 2/32 = 0.5625 bytes.

Letters as in `runtime.types`; also Q: rank of the query's latent, X: positions of a rotary table,
I: rows of an output selection, Y: layers, Z: key/value heads of the drafter, J: head width there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.cost import Cost

BF16, F32_, I32_ = 2.0, 4.0, 4.0
W4_BYTES = 0.5625  # 4-bit code + one bf16 scale for 32 of them

Symbols = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an implementation may be from the definition: |a - b| <= atol + rtol |b|, and the cosine."""

    atol: float
    rtol: float
    cosine: float = 0.9999


EXACT = Tolerance(0.0, 0.0, 1.0)
ROUNDED = Tolerance(1e-2, 1.6e-2)  # two steps of bf16 (2^-8 each way)
ACCUMULATED = Tolerance(2e-2, 2e-2)  # sums in another order, then one rounding


@dataclass(frozen=True, slots=True)
class Op:
    """One entry: what it is, the shapes it takes, what it must cost, how exact it has to be, where it comes from."""

    name: str
    signature: str
    doc: str
    cost: Callable[[Symbols], Cost]
    tolerance: Tolerance
    source: str


def expected_experts(experts: float, top_k: float, rows: float) -> float:
    """Distinct experts hit by `rows` tokens under independent uniform routing: E (1 - (1 - k/E)^M).

    An upper bound on what correlated real tokens hit.
    """
    missed: float = (1.0 - top_k / experts) ** rows
    return experts * (1.0 - missed)


def _gemm(m: float, n: float, k: float) -> Cost:
    return Cost(2.0 * m * n * k, BF16 * (n * k + m * k), BF16 * m * n)


def _elementwise(values: float, reads: float, writes: float, flops: float) -> Cost:
    return Cost(flops * values, BF16 * reads * values, BF16 * writes * values)


def _moe_cost(s: Symbols) -> Cost:
    distinct = s.get("distinct", expected_experts(s["E"], s["k"], s["M"]))
    weights = distinct * 3.0 * s["F"] * s["H"] * W4_BYTES
    return Cost(6.0 * s["M"] * s["k"] * s["F"] * s["H"], weights + 2.0 * BF16 * s["M"] * s["H"], BF16 * s["M"] * s["H"])


def _absorbed_rows(s: Symbols) -> float:
    """Rows that no chunk_attention of the step takes: `chunk_rows` says how many it does, with `chunk_keys`, `chunk_row_keys`."""
    return s["M"] - s.get("chunk_rows", 0.0)


def _row_keys(s: Symbols) -> float:
    """Keys that rows see, summed over all rows of the step."""
    return s.get("row_keys", s["keys"] * s["M"] / max(s["B"], 1.0))


def _absorbing_cost(s: Symbols, weights: float, read: float, written: float) -> Cost:
    """A product with `weights` numbers for the absorbed rows, each of which reads and writes so many numbers; none, and nothing is read."""
    rows = _absorbed_rows(s)
    return Cost(2.0 * rows * weights, BF16 * ((weights if rows else 0.0) + rows * read), BF16 * rows * written)


def _tree_mla_cost(s: Symbols) -> Cost:
    """Latents of each sequence's context are read once, whatever its rows; `keys` counts them over the batch."""
    keys, row_keys = s["keys"] - s.get("chunk_keys", 0.0), _row_keys(s) - s.get("chunk_row_keys", 0.0)
    latent = s["L"] + s["R"]
    io = _absorbed_rows(s) * s["A"]
    return Cost(2.0 * s["A"] * row_keys * (latent + s["L"]), BF16 * (keys * latent + io * latent), BF16 * io * s["L"])


def _chunk_attention_cost(s: Symbols) -> Cost:
    """All rows in chunks unless `chunk_rows` and its keys say which are: each key is expanded once for every head."""
    taken = "chunk_rows" in s
    rows, keys, row_keys = (s["chunk_rows"], s["chunk_keys"], s["chunk_row_keys"]) if taken else (s["M"], s["keys"], _row_keys(s))
    query, wide = s["N"] + s["R"], s["N"] + s["U"]
    flops = 2.0 * s["A"] * (keys * s["L"] * wide + row_keys * (query + s["U"]))
    read = keys * (s["L"] + s["R"]) + (s["A"] * s["L"] * wide if rows else 0.0) + rows * s["A"] * query
    return Cost(flops, BF16 * read, BF16 * rows * s["A"] * s["U"])


def _block_attention_cost(s: Symbols) -> Cost:
    keys = s["keys"] + s["M"]
    row_keys = s["M"] * keys / max(s["B"], 1.0)
    width = s["J"]
    return Cost(4.0 * s["A"] * width * row_keys, BF16 * (2.0 * keys * s["Z"] + s["M"] * s["A"]) * width, BF16 * s["M"] * s["A"] * width)


_ENTRIES = (
    Op(
        "embed",
        "token: [M] i32, table: [V, H] bf16, first: int -> out: [M, H] bf16",
        "out[i] = table[token[i] - first], zeros where that row belongs to another rank (then an all-reduce adds the ranks up).",
        lambda s: Cost(0.0, BF16 * s["M"] * s["H"], BF16 * s["M"] * s["H"]),
        EXACT,
        "vocabulary-parallel embedding, arXiv 1909.08053 section 3",
    ),
    Op(
        "rms_norm",
        "x: [M, H] bf16, w: [H] bf16, eps: float -> out: [M, H] bf16",
        "out = x * rsqrt(mean(x^2) + eps) * w, in float32, rounded once.",
        lambda s: _elementwise(s["M"] * s["H"], 1.0, 1.0, 4.0),
        ROUNDED,
        "arXiv 1910.07467",
    ),
    Op(
        "add_rms_norm",
        "x: inout [M, H] bf16, delta: [M, H] bf16, w: [H] bf16, eps: float -> out: [M, H] bf16",
        "x += delta (rounded), then out = rms_norm(x): the residual stream and the next block's input in one pass.",
        lambda s: _elementwise(s["M"] * s["H"], 2.0, 2.0, 5.0),
        ROUNDED,
        "arXiv 1910.07467",
    ),
    Op(
        "linear",
        "x: [M, K] bf16, w: [N, K] bf16 -> out: [M, N] bf16",
        "out = x w^T, accumulated in float32, rounded once.",
        lambda s: _gemm(s["M"], s["N"], s["K"]),
        ACCUMULATED,
        "BLAS level 3",
    ),
    Op(
        "silu_mul",
        "x: [M, 2*F] bf16 -> out: [M, F] bf16",
        "out = silu(x[:, :F]) * x[:, F:]: the gate of a SwiGLU block.",
        lambda s: _elementwise(s["M"] * s["F"], 2.0, 1.0, 6.0),
        ROUNDED,
        "arXiv 2002.05202",
    ),
    Op(
        "mla_latent",
        "a: [M, Q+L+R] bf16, q_norm: [Q] bf16, kv_norm: [L] bf16, eps: float, pos: [M] i32, slot: [M] i32, cos_sin: [X, R] f32"
        " -> q_latent: [M, Q] bf16, cache: [S, L+R] bf16",
        "Splits the fused down-projection: q_latent = rms_norm(a[:, :Q]); cache[slot] = [rms_norm(latent) | rope(k_pe, pos)]. "
        "Interleaved pairs; cos_sin rows hold R/2 cosines, then R/2 sines.",
        lambda s: _elementwise(s["M"] * (s["Q"] + s["L"] + s["R"]), 1.0, 1.0, 5.0),
        ROUNDED,
        "MLA, arXiv 2405.04434 section 2.1; RoPE, arXiv 2104.09864",
    ),
    Op(
        "mla_query",
        "q: [M, A*(N+R)] bf16, w_uk: [A, L, N] bf16, pos: [M] i32, cos_sin: [X, R] f32 -> out: [M, A, L+R] bf16",
        "Absorbs the key up-projection into the query: out = [q_nope w_uk^T | rope(q_pe, pos)] for each head.",
        lambda s: _absorbing_cost(s, s["A"] * s["N"] * s["L"], s["A"] * (s["N"] + s["R"]), s["A"] * (s["L"] + s["R"])),
        ACCUMULATED,
        "weight absorption, arXiv 2405.04434 appendix C",
    ),
    Op(
        "tree_mla",
        "q: [M, A, L+R] bf16, cache: [S, L+R] bf16, pages: [B, P] i32, page_size: int, ctx: [B] i32, row0: [B] i32,"
        " seq: [M] i32, pos: [M] i32,"
        " slot: [M] i32, ancestors: [M, W] u64, scale: float -> out: [M, A, L] bf16",
        "Attention of each row over its sequence's ctx committed latents and its own ancestors (itself included); the"
        " value of a key is its "
        "first L numbers. Softmax in float32.",
        _tree_mla_cost,
        ACCUMULATED,
        "MLA, arXiv 2405.04434; online softmax, arXiv 2205.14135; tree mask, arXiv 2604.12989",
    ),
    Op(
        "split_chunks",
        "seq: [M] i32, pos: [M] i32, ctx: [B] i32, row0: [B] i32, least: int, room: int -> rest: [M] i32",
        "rest = seq, but -1 for the rows of long chunks, which chunk_attention attends: sequences of `least` rows or more in a chain"
        " (row j at position ctx + j), in order, as long as their keys, rounded up to 128 each, fit `room`.",
        lambda s: Cost(0.0, I32_ * (2.0 * s["M"] + 2.0 * s["B"]), I32_ * s["M"]),
        EXACT,
        "-",
    ),
    Op(
        "chunk_attention",
        "q: [M, A*(N+R)] bf16, absorbed: [M, A, L+R] bf16, cache: [S, L+R] bf16, w_uk: [A, L, N] bf16, w_uv: [A, U, L] bf16,"
        " pages: [B, P] i32, page_size: int, ctx: [B] i32, row0: [B] i32, seq: [M] i32, rest: [M] i32, scale: float,"
        " value: inout [M, A*U] bf16 ->",
        "Un-absorbed attention of the rows that split_chunks took (rest -1, seq not), over all keys up to their own: keys"
        " [latent w_uk | rotated key] and values latent w_uv of every head, rounded as the cache is; queries [q_nope | rotated part of"
        " `absorbed`]. Other rows of value stay. Softmax in float32.",
        _chunk_attention_cost,
        ACCUMULATED,
        "MLA, arXiv 2405.04434 section 2.1; online softmax, arXiv 2205.14135",
    ),
    Op(
        "mla_value",
        "u: [M, A, L] bf16, w_uv: [A, U, L] bf16 -> out: [M, A*U] bf16",
        "out = u w_uv^T for each head: the value up-projection, after attention instead of before.",
        lambda s: _absorbing_cost(s, s["A"] * s["U"] * s["L"], s["A"] * s["L"], s["A"] * s["U"]),
        ACCUMULATED,
        "arXiv 2405.04434 appendix C",
    ),
    Op(
        "route",
        "x: [M, H] bf16, w: [E, H] bf16, bias: [E] f32, scale: float -> expert: [M, k] i32, weight: [M, k] f32",
        "s = sigmoid(x w^T) in float32. The k largest of s + bias are chosen, ties to the lower expert; their weights are the unbiased "
        "s / (sum s + 1e-20) * scale.",
        lambda s: Cost(2.0 * s["M"] * s["E"] * s["H"], BF16 * (s["E"] + s["M"]) * s["H"] + F32_ * s["E"], 2.0 * F32_ * s["M"] * s["k"]),
        Tolerance(1e-5, 1e-4),
        "auxiliary-loss-free routing, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437 section 2.1.2",
    ),
    Op(
        "moe_w4",
        "x: [M, H] bf16, expert: [M, k] i32, weight: [M, k] f32, w13: [E, 2*F, H] w4, w2: [E, H, F] w4, base: [M, H]"
        " bf16 -> out: [M, H] bf16",
        "out = base + sum_k weight * w2[e] (silu(g) * u), [g | u] = w13[e] x. Weights (code - 8) * scale; silu(g) * u"
        " is rounded to bf16; the sum "
        "over experts and base is float32, rounded once.",
        _moe_cost,
        ACCUMULATED,
        "arXiv 2401.04088; INT4 layout after Marlin, arXiv 2408.11743",
    ),
    Op(
        "copy",
        "x: [M, H] bf16 -> out: [M, H] bf16",
        "out = x: a hidden state kept for the drafter (out may be strided).",
        lambda s: _elementwise(s["M"] * s["H"], 1.0, 1.0, 0.0),
        EXACT,
        "hidden-state taps, arXiv 2602.06036",
    ),
    Op(
        "gather_rows",
        "x: [M, H] bf16, rows: [I] i32 -> out: [I, H] bf16",
        "out[i] = x[rows[i]].",
        lambda s: _elementwise(s["I"] * s["H"], 1.0, 1.0, 0.0),
        EXACT,
        "-",
    ),
    Op(
        "kv_move",
        "cache: inout [Y, S, C] bf16, moves: [n, 2] i32 ->",
        "cache[:, to] = cache[:, from] for every (from, to), all reads before all writes: accepted nodes to their places, no re-rotation.",
        lambda s: _elementwise(s["Y"] * s["n"] * s["C"], 1.0, 1.0, 0.0),
        EXACT,
        "compaction, arXiv 2604.12989",
    ),
    Op(
        "sample",
        "logits: [I, V] f32, out_rows: [I] i32, seq: [M] i32, pos: [M] i32, temperature: [B] f32, top_p: [B] f32,"
        " min_p: [B] f32, top_k: [B] i32,"
        " seed: [B] u64, logprobs: [B] i32, adjust_seq: [a, 2] i32, adjust_seq_by: [a, 2] f32, adjust_row: [c, 2] i32,"
        " adjust_row_by: [c, 2] f32, mask_rows: [g] i32, masks: [g, w] u32"
        " -> target: [I] i32, logp: [I] f32, finite: [I] bool, top_ids: [I, K] i32, top_logp: [I, K] f32",
        "Draws the token after each out_row, among those its mask allows, keyed by (seed, position of the drawn token);"
        " log-probabilities are the raw distribution's.",
        lambda s: Cost(8.0 * s["I"] * s["V"], F32_ * s["I"] * s["V"] + 4.0 * s["g"] * s["w"], 9.0 * s["I"]),
        EXACT,
        "Gumbel-max, arXiv 1411.0030; Philox, doi 10.1145/2063384.2063405; top-p, arXiv 1904.09751",
    ),
    Op(
        "head_norm_rope",
        "x: [M, A*J] bf16, w: [J] bf16, eps: float, pos: [M] i32, cos_sin: [X, J] f32 -> out: [M, A, J] bf16",
        "Per head: rms_norm over J, then rotation of halves (j, j + J/2); cos_sin rows hold J/2 cosines, then J/2 sines.",
        lambda s: _elementwise(s["M"] * s["A"] * s["J"], 1.0, 1.0, 8.0),
        ROUNDED,
        "Qwen3, arXiv 2505.09388; RoPE, arXiv 2104.09864",
    ),
    Op(
        "kv_write",
        "k: [M, Z, J] bf16, v: [M, Z*J] bf16, slot: [M] i32 -> k_cache: [S, Z, J] bf16, v_cache: [S, Z, J] bf16",
        "Writes the drafter's context keys and values at their slots.",
        lambda s: _elementwise(2.0 * s["M"] * s["Z"] * s["J"], 1.0, 1.0, 0.0),
        EXACT,
        "DFlash, arXiv 2602.06036",
    ),
    Op(
        "block_attention",
        "q: [M, A, J] bf16, k: [M, Z, J] bf16, v: [M, Z*J] bf16, k_cache: [S, Z, J] bf16, v_cache: [S, Z, J] bf16, pages: [B, P] i32,"
        " page_size: int, ctx: [B] i32, scale: float -> out: [M, A*J] bf16",
        "Each of the B blocks of M/B rows sees its sequence's ctx context keys and its whole own block, without a"
        " causal mask; grouped heads.",
        _block_attention_cost,
        ACCUMULATED,
        "DFlash, arXiv 2602.06036; GQA, arXiv 2305.13245",
    ),
    Op(
        "top_logprobs",
        "logits: [M, V] f32 -> ids: [M, K] i32, logp: [M, K] f32",
        "The K likeliest tokens by falling log-probability, ties to the lower id; log-softmax over the whole vocabulary.",
        lambda s: Cost(4.0 * s["M"] * s["V"], F32_ * s["M"] * s["V"], 2.0 * F32_ * s["M"] * s["K"]),
        Tolerance(1e-4, 1e-4),
        "arXiv 2604.12989 lemma 1",
    ),
    Op(
        "linear_f32",
        "x: [M, K] bf16, w: [N, K] bf16 -> out: [M, N] f32",
        "out = x w^T in float32, not rounded: the logits.",
        lambda s: Cost(2.0 * s["M"] * s["N"] * s["K"], BF16 * (s["N"] + s["M"]) * s["K"], F32_ * s["M"] * s["N"]),
        Tolerance(1e-3, 1e-3),
        "BLAS level 3",
    ),
)

OPS: Mapping[str, Op] = {op.name: op for op in _ENTRIES}
