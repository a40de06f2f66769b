"""A model cut into stages: contiguous ranges of layers, one after the other, and what goes from each to the next.

A stage hands on the residual stream x [M, H] and those taps that a drafter wants and that are known by then. Embedding and head
belong to the first and the last stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.types import Array

Report = Callable[[str], None]  # told what has been loaded


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage holds of a model: layers [start, stop), and perhaps embedding and head."""

    start: int
    stop: int
    embeds: bool = True
    heads: bool = True

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


def stages_of(layers: int, stages: int, drafts: bool) -> tuple[Stage, ...]:
    """The stages of a model; drafts: a drafter on the last one embeds too. Raises as `stage_layers`."""
    found = stage_layers(layers, stages)
    return tuple(Stage(own.start, own.stop, own.start == 0 or (drafts and own.stop == layers), own.stop == layers) for own in found)


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage; earlier ones take what does not divide, for the last one holds the head and the drafter.

    Raises ValueError with the legal sizes.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"pipeline_parallel_size {stages} does not cut this model; legal: 1 to {layers}, its layers")
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


class Passing:
    """Where a forward over some layers keeps x [M, H] and the hidden states after each layer of `taps`.

    What travels lies together, [1 + k, M, H]: x, then the known taps in order of layer. taps [M, n, H], in the order asked for,
    exist on the last stage alone.
    """

    def __init__(self, ops: Any, shape: tuple[int, int], taps: Sequence[int], part: range, layers: int) -> None:
        self._ops, self.last = ops, part.stop == layers
        self._known = sorted(layer for layer in taps if layer < (part.start if self.last else part.stop))
        self._came = sum(layer < part.start for layer in taps)
        self._carried = ops.buffer("x", (1 + len(self._known), *shape))
        self._order = {layer: j for j, layer in enumerate(taps)}
        self.x: Array = self._carried[0]
        self.taps: Array = ops.buffer("taps", (shape[0], len(taps) if self.last else 0, shape[1]))

    def receive(self, neighbours: Any) -> None:
        """Takes what the stage before handed on."""
        neighbours.receive(self._carried[: 1 + self._came])
        if self.last:
            for j, layer in enumerate(self._known):
                self._ops.copy(self._carried[1 + j], out=self.taps[:, self._order[layer]])

    def keep(self, layer: int) -> None:
        """Notes x as it is after this layer, if that is a tap."""
        if layer in self._order:
            out = self.taps[:, self._order[layer]] if self.last else self._carried[1 + self._known.index(layer)]
            self._ops.copy(self.x, out=out)

    def send(self, neighbours: Any) -> None:
        """Hands x and the taps on to the next stage."""
        neighbours.send(self._carried)
