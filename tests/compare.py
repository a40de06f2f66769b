"""Comparing arrays in three ways, so that no kind of error can hide behind another.

Positions of NaN and of each infinity must be the same; every finite element must lie within
atol + rtol |expected|; the cosine over all finite elements must reach a bound. A report names the
worst positions and the share of the tolerance that was used: a test that uses 1 % of its tolerance is
too loose, one that uses 99 % is about to break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.ops import Tolerance


@dataclass(frozen=True)
class Comparison:
    """What compare() found. used: the largest |actual - expected| in units of its own tolerance (1 = just passes)."""

    faults: tuple[str, ...]
    used: float
    cosine: float
    failing: int
    size: int

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        head = f"{self.failing} of {self.size} elements fail, {self.used:.3g} of the tolerance used, cosine {self.cosine:.7f}"
        return "\n".join((head, *self.faults))


def compare(actual: Any, expected: Any, tolerance: Tolerance, *, shown: int = 5) -> Comparison:
    """Compares `actual` with `expected` (the oracle) element by element, in float64."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return Comparison((f"shape {list(actual.shape)}, expected {list(expected.shape)}",), np.inf, 0.0, expected.size, expected.size)
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    faults: list[str] = []
    finite = np.isfinite(a) & np.isfinite(b)
    for kind, found_in in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        at = np.argwhere(found_in(a) != found_in(b))
        if len(at):
            places = ", ".join(f"{_place(i)} is {a[tuple(i)]:g}, expected {b[tuple(i)]:g}" for i in at[:shown])
            faults.append(f"{kind} at {len(at)} different position(s): {places}")
    difference = np.abs(np.where(finite, a - b, 0.0))
    allowed = np.where(finite, tolerance.atol + tolerance.rtol * np.abs(b), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(difference > 0.0, difference / allowed, 0.0)
    failing = int((share > 1.0).sum())
    if failing:
        worst = np.argsort(-share, axis=None, kind="stable")[: min(shown, failing)]
        for flat in worst:
            i = np.unravel_index(flat, a.shape)
            faults.append(f"{_place(i)} is {a[i]:.9g}, expected {b[i]:.9g}: off by {difference[i]:.3g}, allowed {allowed[i]:.3g}")
    cosine = _cosine(a[finite], b[finite])
    if cosine < tolerance.cosine and not (tolerance.cosine == 1.0 and failing == 0):
        faults.append(f"cosine {cosine:.7f} is below {tolerance.cosine}")
    return Comparison(tuple(faults), float(share.max(initial=0.0)), cosine, failing, a.size)


def check_close(actual: Any, expected: Any, tolerance: Tolerance, name: str = "result") -> Comparison:
    """AssertionError with the report unless compare() is satisfied; returns what it found."""
    found = compare(actual, expected, tolerance)
    if not found.ok:
        raise AssertionError(f"{name}: {found}")
    return found


def check_bitwise(actual: Any, expected: Any, name: str = "result") -> None:
    """AssertionError naming the first element that differs in any bit (so -0.0 is not 0.0, NaN equals the same NaN)."""
    actual, expected = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        said = f"{list(actual.shape)} {actual.dtype}, expected {list(expected.shape)} {expected.dtype}"
        raise AssertionError(f"{name}: {said}")
    width = actual.dtype.itemsize
    different = (actual.reshape(-1).view(np.uint8) != expected.reshape(-1).view(np.uint8)).reshape(-1, width).any(axis=1)
    if different.any():
        first = int(np.argmax(different))
        i = np.unravel_index(first, actual.shape)
        count = f"{int(different.sum())} of {actual.size} elements differ"
        raise AssertionError(f"{name}: {count}, first {_place(i)}: {actual[i]!r}, expected {expected[i]!r}")


def _place(index: Any) -> str:
    return "[" + ", ".join(str(int(i)) for i in index) + "]"


def _cosine(a: Any, b: Any) -> float:
    """1 for two zero vectors, 0 if only one is zero."""
    scale_a, scale_b = np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)
    if scale_a == 0.0 or scale_b == 0.0:
        return float(scale_a == scale_b)
    a, b = a / scale_a, b / scale_b
    return float(np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b)))
