"""Stages as hosts: rank 0 schedules and holds the first layers; every other stage follows its plans over TCP.

    stage 0      plan ─▶ links        own layers ─▶ x, taps                                        ◀─ StepResult
    stage 1 …         link ─▶ plan                  x, taps ─▶ own layers ─▶ … ─▶ head, draw ─▶ link

Each stage is an executor of its own: one rank, or a tensor-parallel group on one host. A step goes through all of them one after
the other, so a pipeline buys memory and not speed. Drafts concern the last stage alone.

A stage that ends is seen by whoever waits for it, and by `trouble` while nobody does; rank 0's end ends the others.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.executor import Captures, Executor, Pending, Watched, begin_step
from runtime.lives import Lives, Peers, RankFailed
from runtime.plan import DraftLayout, PlanLayout, pack_draft, pack_plan, unpack_draft, unpack_plan
from runtime.processes import read_sizes, write_sizes
from runtime.ring import CAPTURE, DRAFT, STEP, STOP
from runtime.shared import PeerLost
from runtime.stage_link import Link, StageLost
from runtime.stage_records import CAPTURED, READY, read_plan, receive_drafted, receive_result, send_drafted, send_plan, send_result
from runtime.types import Array, DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits

SETTLE_S = 0.5  # in which the thread that watches a process says what became of it


@dataclass(frozen=True, slots=True)
class Blobs:
    """The plans that stages exchange, and room for one of each."""

    plan: PlanLayout
    draft: DraftLayout
    step_blob: Array  # [plan.nbytes] u8
    draft_blob: Array  # [draft.nbytes] u8

    @staticmethod
    def of(plan: PlanLayout, draft: DraftLayout) -> Blobs:
        return Blobs(plan, draft, np.zeros(plan.nbytes, np.uint8), np.zeros(draft.nbytes, np.uint8))


class StageLives(Lives):
    """The other stages' lives, as far as this process knows of them, and the links to them."""

    def __init__(self, peers: Peers, stages: int) -> None:
        self.links: list[Link] = []  # of stages 1 and up, in order, once they have connected
        self.more: list[Link] = []  # hidden states
        super().__init__(peers, range(1, stages), "stage")

    def lost(self) -> str | None:
        """Why some stage will not answer, None while all are there."""
        return self.story or next(filter(None, (link.lost() for link in self.links)), None)

    def say_stop(self) -> None:
        for link in self.links:
            with contextlib.suppress(StageLost):
                link.send(STOP)

    def tell_lost(self, number: int) -> None:
        self.release()

    def release(self) -> None:
        for link in (*self.links, *self.more):
            link.close()


class Pipeline:
    """An executor over this process's stage, `own`, and the others at the ends of `lives.links`, which have loaded their models.

    shares: mixture-of-experts layers of each stage. draft_depth: of the drafter that the last stage holds.
    """

    def __init__(self, own: Any, lives: StageLives, blobs: Blobs, shares: Sequence[int], draft_depth: int) -> None:
        self._own, self._lives, self._blobs, self._shares = own, lives, blobs, np.array(shares, np.float64)
        self._finalizer = weakref.finalize(self, lives.end)
        self.limits: Limits = replace(own.limits, draft_depth=draft_depth)

    def step(self, plan: StepPlan) -> StepResult:
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        """As `step`, without waiting for the stages; this one's own work is begun where a device does it."""
        begun, blobs = time.perf_counter(), self._blobs
        with self._together() as links:
            pack_plan(plan, blobs.plan, blobs.step_blob)
            for link in links:
                send_plan(link, STEP, blobs.step_blob, blobs.plan)
            own, results = begin_step(self._own, plan), list[StepResult]()

        def wait() -> None:
            with self._together() as links:
                results.extend((own.finish(), *(receive_result(link) for link in links)))
                if len(results[-1].target) != len(plan.out_rows):
                    raise RankFailed(f"the last stage drew {len(results[-1].target)} tokens, where {len(plan.out_rows)} were wanted")

        def read() -> StepResult:
            experts = float(self._shares @ [result.experts for result in results]) / max(1.0, float(self._shares.sum()))
            return replace(results[-1], step_us=(time.perf_counter() - begun) * 1e6, experts=experts)

        return Pending(self._answered, wait, read)

    def draft(self, plan: DraftPlan) -> DraftLogits:
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        """As `draft`, without waiting for the last stage."""
        with self._together() as links:
            pack_draft(plan, self._blobs.draft, self._blobs.draft_blob)
            send_plan(links[-1], DRAFT, self._blobs.draft_blob, self._blobs.draft)
            drafted = list[DraftLogits]()

        def wait() -> None:
            with self._together() as links:
                drafted.append(receive_drafted(links[-1]))

        return Pending(self._answered, wait, lambda: drafted[0])

    def _answered(self) -> bool:
        return self._lives.links[-1].ready()

    def trouble(self) -> str | None:
        """Why no further step can succeed, or None."""
        lives = self._lives
        if lives.story is None and not lives.stopping:
            lost = (self._own.trouble() if isinstance(self._own, Watched) else None) or lives.lost()
            if lost is not None and lives.story is None:
                lives.settle(SETTLE_S)
                lives.fail(lost)
        return lives.story

    def close(self) -> None:
        """Stops the other stages and waits for their ends; those that this process has started and that take longer than 5 s are killed."""
        self._finalizer()
        self._own.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[list[Link]]:
        """One plan at a time; a failure of any stage ends all."""
        lives = self._lives
        with lives.lock:
            lives.check()
            try:
                yield lives.links
            except PeerLost as lost:
                lives.settle(SETTLE_S)
                lives.fail(str(lost))
                raise RankFailed(lives.story) from lost
            except BaseException as error:
                if lives.lost():  # this stage's failure may be another's
                    lives.settle(SETTLE_S)
                lives.fail(str(error) if isinstance(error, RankFailed) else f"stage 0 failed: {type(error).__name__}: {error}")
                raise


class CapturedPipeline(Pipeline):
    """Stages that replay steps as graphs."""

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        """As `Captures.capture`, on all stages; how many graphs this one has."""
        wanted = None if buckets is None else list(buckets)
        room = np.zeros(4 * (1 + len(wanted or ())), np.uint8)
        write_sizes(wanted, room)
        with self._together() as links:
            for link in links:
                link.send(CAPTURE, room)
            count: int = self._own.capture(wanted)
            for link in links:
                link.expect(CAPTURED)
        return count


def follow_stage(executor: Executor, link: Link, blobs: Blobs) -> None:
    """Executes stage 0's plans until it says stop. Tells it what fails, and raises that; raises StageLost if stage 0 is gone."""

    def check() -> None:
        if isinstance(executor, Watched) and (trouble := executor.trouble()) is not None:
            raise RankFailed(trouble)

    try:
        link.send(READY)
        while True:
            kind, nbytes = link.receive(check)
            if kind == STOP:
                return
            if kind == STEP:
                read_plan(link, nbytes, blobs.step_blob, blobs.plan)
                send_result(link, executor.step(unpack_plan(blobs.step_blob, blobs.plan)))
            elif kind == DRAFT:
                read_plan(link, nbytes, blobs.draft_blob, blobs.draft)
                send_drafted(link, executor.draft(unpack_draft(blobs.draft_blob, blobs.draft)))
            elif kind == CAPTURE and isinstance(executor, Captures):
                executor.capture(read_sizes(np.frombuffer(link.read_bytes(), np.uint8)))
                link.send(CAPTURED)
            else:
                raise StageLost(f"{link.name} sent a record of kind {kind}, which this stage does not know")
    except Exception as error:
        link.fail(f"{type(error).__name__}: {error}")
        raise


def wait_ready(links: Iterable[Link], check: Callable[[], None]) -> None:
    """Returns once the stages at the ends of the links have loaded. check: as `Link.receive`'s. Raises StageLost."""
    for link in links:
        link.expect(READY, check)
