"""What the engine asks of whoever runs the model: one rank, many ranks, or a script in a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits


class Executor(Protocol):
    """Runs the target and the drafter.

    The order of calls is part of the protocol. tap_rows of a DraftPlan are rows of the StepPlan that
    was executed last, and `draft` writes the drafter's K/V of those tokens straight to their final
    slots. The moves of a StepPlan concern the target's cache alone, come before anything else in the
    step, and read all sources as the last step left them.
    """

    @property
    def limits(self) -> Limits: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def draft(self, plan: DraftPlan) -> DraftLogits: ...

    def close(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """An executor that may fail between steps too: other processes run parts of it."""

    def trouble(self) -> str | None:
        """Why no further step can succeed, or None."""


@runtime_checkable
class Captures(Protocol):
    """An executor that replays steps as graphs."""

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        """Captures the steps of these buckets, None: all there are; returns how many graphs there are then."""
