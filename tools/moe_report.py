"""What a table of MoE rows says: bandwidth of the streaming regime, threshold, plateau, ridge, a step's estimate; and the plot.

Everything here is computed from the rows and the numbers given; nothing touches a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime import curve
from runtime.curve import MARGINAL_SHARE
from runtime.hw import Hardware
from runtime.ops import OPS, expected_experts

NOTES = {1: "AR C=1", 9: "verify b8 C=1", 90: "10 streams b8", 256: "28 streams b8", 1024: "prefill chunk"}


@dataclass(frozen=True, slots=True)
class Shape:
    """E experts, top-k, hidden H, expert width F on this rank."""

    E: int
    H: int
    F: int
    k: int

    @property
    def expert_bytes(self) -> float:
        return 3.0 * self.F * self.H * 0.5625

    def flops(self, m: float) -> float:
        return 6.0 * m * self.k * self.F * self.H


@dataclass(frozen=True, slots=True)
class Row:
    """One measured or predicted M."""

    M: int
    ms: float
    experts: float
    gb: float

    @property
    def tb_s(self) -> float:
        return self.gb / self.ms


def note_of(m: int) -> str:
    return NOTES.get(m, "")


def predicted_rows(shape: Shape, sizes: Sequence[int], hw: Hardware, share: float = 0.94, fixed_us: float = 8.0) -> list[Row]:
    """Rows as the op's cost predicts them: floor / share + a fixed part for launches and ramps."""
    rows = []
    for m in sizes:
        experts = expected_experts(shape.E, shape.k, m)
        cost = OPS["moe_w4"].cost({"M": m, "E": shape.E, "H": shape.H, "F": shape.F, "k": shape.k})
        rows.append(Row(m, (cost.floor_us(hw) / share + fixed_us) / 1e3, experts, experts * shape.expert_bytes / 1e9))
    return rows


def fit_streaming(rows: Sequence[Row], experts: int) -> tuple[float, float]:
    """(fixed ms, TB/s) of ms = fixed + GB / bandwidth, least squares over the rows that do not reach every expert."""
    part = [r for r in rows if r.experts < 0.97 * experts]
    if len(part) < 2:
        return 0.0, float(rows[0].tb_s)
    gb, ms = np.array([r.gb for r in part]), np.array([r.ms for r in part])
    weight = 1.0 / ms
    design = np.stack([np.ones_like(gb), gb], axis=1) * weight[:, None]
    fixed, slope = np.linalg.lstsq(design, ms * weight, rcond=None)[0]
    return float(fixed), float(1.0 / slope)


def find_threshold(rows: Sequence[Row]) -> int | None:
    """M*, as `runtime.curve` defines it for any timed step."""
    return curve.find_threshold([r.M for r in rows], [r.ms for r in rows])


def find_plateau(rows: Sequence[Row], threshold: int | None, within: float = 1.25) -> tuple[int, int] | None:
    """(first, last) M of the flat part: times within 25 % of the threshold's."""
    if threshold is None:
        return None
    level = next(r.ms for r in rows if threshold == r.M)
    flat = [r.M for r in rows if threshold <= r.M and r.ms <= within * level]
    return flat[0], flat[-1]


def compute_ridge(shape: Shape, read_bps: float, tensor_flops: float) -> float:
    """M where computing all experts takes as long as reading them."""
    return shape.E * shape.expert_bytes / read_bps * tensor_flops / shape.flops(1)


def step_terms(rows: Sequence[Row], m: int, tp: int, hw: Hardware, layers: int = 60, keys: int = 4096) -> dict[str, float]:
    """Milliseconds of a step of Kimi K2.6 at TP `tp`, term by term: the MoE as measured, the rest at the byte floor.

    A layer of attention projections is 101 M parameters in bf16 (q_a and kv_a on every rank), the shared expert 44 M, the
    router 2.75 M; keys: context of each row's sequence, 1152 bytes a token and layer, read once a row here; two all-reduces.
    """
    moe = float(np.interp(m, [r.M for r in rows], [r.ms for r in rows]))
    replicated, split = 7168 * (1536 + 576), 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
    attention = 2.0 * (replicated + split / tp) + m * keys * 1152.0
    dense = 2.0 * (3 * 7168 * 2048 / tp + 384 * 7168)
    return {
        "moe": layers * moe,
        "attention": (layers + 1) * attention / hw.read_bps * 1e3,
        "dense": (layers * dense + 2.0 * (3 * 7168 * 18432 + 163840 * 7168) / tp) / hw.read_bps * 1e3,
        "all-reduce": 0.0 if tp == 1 else (layers + 1) * 2 * (hw.link_us + m * 7168 * 2 / hw.link_bps * 1e6) / 1e3,
    }


def analyse(rows: Sequence[Row], shape: Shape, read_bps: float, tp: int, hw: Hardware) -> str:
    """The analysis in words and numbers, each with its assumption."""
    fixed, tb_s = fit_streaming(rows, shape.E)
    threshold = find_threshold(rows)
    plateau = find_plateau(rows, threshold)
    ridge = compute_ridge(shape, read_bps, hw.tensor_flops)
    lines = [
        f"streaming regime: time = {fixed * 1e3:.1f} us + GB of distinct experts / {tb_s:.2f} TB/s "
        f"({tb_s * 1e12 / read_bps:.3f} of the read rate {read_bps * 1e-12:.2f} TB/s; rows below 97 % of {shape.E} experts)",
        f"threshold M* = {threshold}: from there a further row costs less than {MARGINAL_SHARE:.0%} of the average one "
        "(difference to the next measured M)",
    ]
    if plateau:
        lines.append(f"plateau: M = {plateau[0]} to {plateau[1]} within 25 % of the time at M*")
    lines.append(f"compute ridge: M = {ridge:.0f} at {hw.tensor_flops * 1e-12:.0f} dense bf16 TFLOP/s; all experts read once")
    if threshold:
        pairs = ", ".join(f"{-(-threshold // (b + 1))} streams x ({b} + 1)" for b in (0, 3, 7, 15, 31, 63))
        lines.append(f"M* is reached by {pairs}")
    lines.append(f"a step of 60 MoE layers at TP {tp} (MoE measured, the rest at the byte floor, 4096 keys a row, nothing overlapped):")
    for m in (1, 9, 90, 256):
        if rows[0].M <= m <= rows[-1].M:
            terms = step_terms(rows, m, tp, hw)
            shown = " + ".join(f"{name} {ms:.2f}" for name, ms in terms.items())
            lines.append(f"  M = {m:4d}: {shown} = {sum(terms.values()):.2f} ms")
    return "\n".join(lines)


PUBLISHED = {1: 0.151, 9: 1.180, 32: 3.171, 90: 5.189, 256: 7.018}  # ms a layer, 8x RTX PRO 6000, 1.79 TB/s a card


def compare_published(shape: Shape, hw: Hardware) -> str:
    """The published table of an RTX PRO 6000 box against the op's cost at that card's bandwidth, one card, whole experts."""
    lines = ["published on RTX PRO 6000 (1.79 TB/s), ms a layer; predicted = distinct experts' bytes / 1.79 TB/s / 0.94 + 8 us:"]
    rates = []
    for row in predicted_rows(shape, list(PUBLISHED), hw):
        ours = PUBLISHED[row.M]
        rates.append(row.gb / ours)
        off = f"{row.ms / ours - 1:+.0%}"
        lines.append(f"  M = {row.M:3d}: published {ours:.3f}, predicted {row.ms:.3f} ({off}), published rate {rates[-1]:.2f} TB/s")
    low, high = min(rates) * 1e12 / hw.read_bps, max(rates) * 1e12 / hw.read_bps
    lines.append(
        f"  so that table's kernel streams {low:.2f} to {high:.2f} of its card's datasheet rate where 0.94 is assumed here; its growth "
        "from M = 1 to 90 is the distinct experts', the last step (90 to 256) is steeper: experts with more rows than a tile are read again"
    )
    return "\n".join(lines)


def draw(rows: Sequence[Row], shape: Shape, read_bps: float, hw: Hardware, title: str, buckets: Sequence[int]) -> str:
    """SVG of ms over M, both logarithmic: measured, byte floor, compute floor, M*, ridge, buckets. The same rows give the same bytes."""
    width, height, left, right, top, bottom = 760, 460, 70, 20, 40, 60
    floor = [expected_experts(shape.E, shape.k, r.M) * shape.expert_bytes / read_bps * 1e3 for r in rows]
    compute = [shape.flops(r.M) / hw.tensor_flops * 1e3 for r in rows]
    low = 10 ** math.floor(math.log10(min(floor)))
    high = 10 ** math.ceil(math.log10(max(r.ms for r in rows)))
    span = math.log(rows[-1].M / rows[0].M) or 1.0

    def x(m: float) -> float:
        return left + (width - left - right) * math.log(m / rows[0].M) / span

    def y(ms: float) -> float:
        return height - bottom - (height - top - bottom) * math.log(max(ms, low) / low) / math.log(high / low)

    def line(points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'

    def text(px: float, py: float, words: str, anchor: str = "start", size: int = 12) -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" font-size="{size}" text-anchor="{anchor}" font-family="sans-serif">{words}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">']
    parts += [f'<rect width="{width}" height="{height}" fill="white"/>', text(width / 2, 22, title, "middle", 14)]
    decade = low
    while decade <= high * 1.001:
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(decade):.1f}" y2="{y(decade):.1f}" stroke="#ddd"/>')
        parts.append(text(left - 6, y(decade) + 4, f"{decade:g}", "end"))
        decade *= 10
    for r in rows:
        mark = 8 if r.M in buckets else 4
        parts.append(f'<line x1="{x(r.M):.1f}" x2="{x(r.M):.1f}" y1="{height - bottom}" y2="{height - bottom + mark}" stroke="black"/>')
        if r.M in (1, 4, 16, 64, 256, 1024, 4096) or r is rows[-1]:
            parts.append(text(x(r.M), height - bottom + 22, str(r.M), "middle"))
    parts += [text(width / 2, height - 12, "rows M", "middle"), text(12, top - 8, "ms a layer")]
    parts.append(line([(x(r.M), y(f)) for r, f in zip(rows, floor, strict=True)], "#2a7", "6 4"))
    parts.append(line([(x(r.M), y(c)) for r, c in zip(rows, compute, strict=True) if c >= low], "#c63", "2 4"))
    parts.append(line([(x(r.M), y(r.ms)) for r in rows], "#136"))
    parts += [f'<circle cx="{x(r.M):.1f}" cy="{y(r.ms):.1f}" r="3" fill="#136"/>' for r in rows]
    marks = [(find_threshold(rows), "M*"), (compute_ridge(shape, read_bps, hw.tensor_flops), "ridge")]
    for m, name in marks:
        if m and rows[0].M <= m <= rows[-1].M:
            parts.append(f'<line x1="{x(m):.1f}" x2="{x(m):.1f}" y1="{top}" y2="{height - bottom}" stroke="#999" stroke-dasharray="3 3"/>')
            parts.append(text(x(m) + 4, top + 12, f"{name} {m:.0f}"))
    legend = (("measured", "#136"), ("distinct experts' bytes / read rate", "#2a7"), ("flops / dense bf16 rate", "#c63"))
    for i, (name, colour) in enumerate(legend):
        parts.append(f'<rect x="{left + 12}" y="{top + 8 + 18 * i}" width="14" height="4" fill="{colour}"/>')
        parts.append(text(left + 32, top + 14 + 18 * i, name))
    return "\n".join([*parts, "</svg>", ""])
