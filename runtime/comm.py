"""What a model asks of its rank's peers, and the answer of a rank that has none.

Ranks sum parts in rank order, so all hold the same bits and sample the same tokens without a broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from runtime.types import Array


class Comm(Protocol):
    """What a model needs of its peers."""

    rank: int
    world: int

    def all_reduce(self, x: Array) -> None:
        """x [M, H] bf16 becomes the sum over ranks, in place, rounded once."""

    def all_reduce_norm(self, ops: Any, x: Array, delta: Array, w: Array, eps: float, *, out: Array) -> None:
        """x [M, H] += the sum over ranks of delta; out = rms_norm(x) w: what follows every layer's half. Leaves delta undefined."""

    def top_logprobs(self, ops: Any, logits: Array, *, ids: Array, logp: Array) -> None:
        """ops.top_logprobs over the whole vocabulary, of which this rank has logits [M, V / W]."""

    def sample(self, ops: Any, logits: Array, drawing: Sequence[Array], **outputs: Array) -> None:
        """ops.sample over the whole vocabulary, of which this rank has logits [I, V / W]; drawing: `StepPlan.drawing`."""

    def all_gather(self, x: Array, *, out: Array) -> None:
        """out [M, W * N] = the ranks' x [M, N], side by side in rank order."""


class Neighbours(Protocol):
    """What a model that is cut into stages needs of the ranks of its number before and after its own."""

    def receive(self, x: Array) -> None:
        """x [n, M, H] bf16 becomes what the stage before sent."""

    def send(self, x: Array) -> None:
        """Hands x [n, M, H] bf16 to the next stage, which receives as much."""


class SoloComm:
    """One rank: a sum of one, a row of one."""

    rank = 0
    world = 1

    def all_reduce(self, x: Array) -> None:
        return None

    def all_reduce_norm(self, ops: Any, x: Array, delta: Array, w: Array, eps: float, *, out: Array) -> None:
        ops.add_rms_norm(x, delta, w, eps, out=out)

    def top_logprobs(self, ops: Any, logits: Array, *, ids: Array, logp: Array) -> None:
        ops.top_logprobs(logits, ids=ids, logp=logp)

    def sample(self, ops: Any, logits: Array, drawing: Sequence[Array], **outputs: Array) -> None:
        ops.sample(logits, *drawing, **outputs)

    def all_gather(self, x: Array, *, out: Array) -> None:
        out[:] = x
