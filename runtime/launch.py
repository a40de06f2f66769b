"""Starting ranks: one in this thread, or several as threads of this process (tensor parallelism on a CPU)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from runtime.comm import ThreadComm, make_thread_comms
from runtime.plan import PlanLayout, pack_plan, unpack_plan
from runtime.types import DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits, Worker, check_ranks_agree

T = TypeVar("T")


class ThreadRanks:
    """An executor over rank threads: the plan's bytes go to every rank, rank 0's results come back.

    A rank that fails breaks the barrier, so that all stop, and its error is raised here.
    """

    def __init__(self, make_worker: Callable[[int, ThreadComm], Worker], world: int, layout: PlanLayout) -> None:
        self._comms = make_thread_comms(world)
        self._pool = ThreadPoolExecutor(world, thread_name_prefix="rank")
        self._layout = layout
        self._blob = np.zeros(layout.nbytes, np.uint8)
        self._lock = threading.Lock()
        self._workers = self._together([partial(make_worker, rank, comm) for rank, comm in enumerate(self._comms)])
        self.limits: Limits = self._workers[0].limits

    def _together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        def guarded(rank: int, call: Callable[[], T]) -> T:
            try:
                return call()
            except BaseException:
                self._comms[rank].abort()
                raise

        futures: list[Future[T]] = [self._pool.submit(guarded, rank, call) for rank, call in enumerate(calls)]
        errors = [e for e in (f.exception() for f in futures) if e is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [f.result() for f in futures]

    def step(self, plan: StepPlan) -> StepResult:
        with self._lock:
            pack_plan(plan, self._layout, self._blob)
            seen = unpack_plan(self._blob, self._layout)
            results = self._together([partial(worker.step, seen) for worker in self._workers])
        check_ranks_agree(results)
        return results[0]

    def draft(self, plan: DraftPlan) -> DraftLogits:
        with self._lock:
            return self._together([partial(worker.draft, plan) for worker in self._workers])[0]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._pool.shutdown(wait=True)
