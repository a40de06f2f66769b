"""What the host takes of a step beside the device: by streams, by draft nodes, with a draft and without."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.learned import Learned
from runtime.types import Array

F64 = NDArray[np.float64]
EDGES = tuple(1 << k for k in range(11))  # nodes of all streams together
# Shapes of what is not measured, read off the demo model on an H200 (sweetspot_h200.jsonl less the times of curves/h200-demo.json):
# chains of 7 took the host 0.3 ms with 1 stream, 0.53 with 8 and 1.3 with 32; trees of 32 instead of 7 nodes 1.4 times as long; a step
# without a draft 0.4 times.
STREAMS, NODES_EACH, PLAIN = 8.0, 40.0, 0.4

Case = tuple[int, bool]  # power of two of the streams, drafted


class HostCost:
    """Seconds of the host, from the last steps of as many streams; before there are any, what was seen of others, scaled.

    fixed_s: what it takes until anything is seen.
    """

    def __init__(self, fixed_s: float) -> None:
        self.fixed_s = fixed_s
        self._cases: dict[Case, Learned] = {}

    @property
    def seen(self) -> bool:
        """Whether any step was."""
        return bool(self._cases)

    def at(self, streams: int, nodes: Array | int, drafted: bool) -> F64:
        """Seconds of a step of so many streams with each count of nodes."""
        case = _case(streams, drafted)
        nodes = np.maximum(nodes, 1)
        if case in self._cases:
            return self._cases[case].between(nodes)
        if not self._cases:
            return np.full(np.shape(nodes), self.fixed_s)
        near = min(self._cases, key=lambda other: (other[1] != drafted, abs(other[0] - case[0])))
        found: F64 = self._cases[near].between(nodes) * (_scale(case) / _scale(near))
        return found

    def observe(self, streams: int, nodes: int, drafted: bool, seconds: float) -> None:
        """Counts one step in."""
        case = _case(streams, drafted)
        if case not in self._cases:
            each = 1 << case[0]
            self._cases[case] = Learned(EDGES, [1.0 + edge / (NODES_EACH * each) for edge in EDGES])
        self._cases[case].observe(min(max(nodes, 1), EDGES[-1]), seconds)

    def to_json(self) -> list[list[Any]]:
        """[power of two of the streams, drafted, milliseconds at EDGES] of each case."""
        return [
            [power, drafted, [round(v * 1e3, 6) for v in held.value.tolist()]] for (power, drafted), held in sorted(self._cases.items())
        ]

    def read(self, cases: list[list[Any]]) -> None:
        """Takes what `to_json` gave as the shape and size to begin with."""
        for power, drafted, ms in cases:
            self._cases[int(power), bool(drafted)] = Learned(EDGES, [v / 1e3 for v in ms])


def _case(streams: int, drafted: bool) -> Case:
    return (max(streams, 1) - 1).bit_length(), drafted


def _scale(case: Case) -> float:
    power, drafted = case
    return (STREAMS + (1 << power)) * (1.0 if drafted else PLAIN)
