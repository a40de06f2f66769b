"""What the engine asks of whoever runs the model: one rank, many ranks, or a script in a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits

P = TypeVar("P")
R = TypeVar("R")


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


@dataclass(frozen=True, slots=True)
class Pending(Generic[R]):
    """A plan that has been handed over. Each is called once, in this order, before the next plan is handed over."""

    done: Callable[[], bool]  # whether `wait` would return at once
    wait: Callable[[], None]  # returns when the device has nothing to do any more; raises what went wrong there
    read: Callable[[], R]  # what it left

    def finish(self) -> R:
        self.wait()
        return self.read()


@runtime_checkable
class Overlaps(Protocol):
    """An executor whose device works by itself: between handing a plan over and its results the host is free."""

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]: ...

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]: ...


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


def begin_step(executor: Executor, plan: StepPlan) -> Pending[StepResult]:
    """Hands a step over. Where host and device are one nothing can overlap: the work is done when it is waited for."""
    begin = getattr(executor, "begin_step", None)  # `Overlaps`; asking for the protocol itself takes 4 us
    return _later(executor.step, plan) if begin is None else begin(plan)


def begin_draft(executor: Executor, plan: DraftPlan) -> Pending[DraftLogits]:
    """Likewise a draft."""
    begin = getattr(executor, "begin_draft", None)
    return _later(executor.draft, plan) if begin is None else begin(plan)


def _later(run: Callable[[P], R], plan: P) -> Pending[R]:
    results: list[R] = []
    return Pending(lambda: False, lambda: results.append(run(plan)), lambda: results[0])
