"""The definition beside a device that rounds otherwise. Two experts that a router finds equally good are chosen by rounding, and the
wrong one changes a whole row; so there, and only there, the definition goes on with the device's choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.kernels_np import NumpyBackend, moe
from runtime.kernels_np.rows import product

FORCED = np.float32(1e3)  # a bias that outdoes every score


@dataclass(frozen=True)
class Followed:
    """layer: of those with experts. gap: by how much (sigmoid + bias) the best expert given up outdoes the worst one taken for it."""

    layer: int
    row: int
    gap: float


class Following(NumpyBackend):
    """tie: gaps from here on are errors of the device. bf16 moves a score by a few thousandths: on the shim the tiny models choose
    otherwise in one of 165 rows, at gaps of 0.0022 and 0.0024, the demo in 9 of 1,800 choices, at gaps to 0.0013. With those followed
    no row's cosine is below 0.9999."""

    def __init__(self, tie: float) -> None:
        super().__init__("bfloat16")
        self.tie = tie
        self.followed: list[Followed] = []
        self._layers: Iterator[tuple[int, np.ndarray]] = iter(())

    def follow(self, choices: Sequence[np.ndarray]) -> None:
        """The device's choices in the next step: of each layer with experts [>= M, top_k]."""
        self._layers = iter(list(enumerate(choices)))

    def route(self, x, w, bias, scale, *, expert, weight) -> None:
        """Raises AssertionError for a choice that is none, or one of an expert that is worse by `tie` or more."""
        moe.route(x, w, bias, scale, expert=expert, weight=weight)
        layer, theirs = next(self._layers)
        with np.errstate(over="ignore"):
            ranked = np.float32(1.0) / (np.float32(1.0) + np.exp(-product(x, w))) + bias
        for row in np.flatnonzero((np.sort(expert) != np.sort(theirs[: len(expert)])).any(1)):
            mine, other = expert[row], theirs[row]
            taken, given_up = np.setdiff1d(other, mine), np.setdiff1d(mine, other)
            where = f"layer {layer}, row {row}: experts {other.tolist()} for {mine.tolist()}"
            assert len(taken) == len(given_up) and taken.min() >= 0 and taken.max() < len(w), f"{where} are no choice of {len(w)}"
            gap = float(ranked[row, given_up].max() - ranked[row, taken].min())
            assert gap < self.tie, f"{where}, a gap of {gap:.4f}"
            forced = bias.copy()
            forced[other] += FORCED
            moe.route(x[row : row + 1], w, forced, scale, expert=expert[row : row + 1], weight=weight[row : row + 1])
            self.followed.append(Followed(layer, int(row), gap))
