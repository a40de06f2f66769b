"""Ranks whose workers capture: sizes reach all of them, a refused one reaches nobody else. Workers are scripted, processes forked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from runtime.lives import RankEvent
from runtime.plan import DraftLayout, PlanLayout
from runtime.processes import CapturedRanks, Meeting, RankFailed, follow
from runtime.shared import SharedBlock
from runtime.types import DraftLogits, StepResult
from runtime.worker import Limits
from tests.plans import make_plan, page_table

MEETING = Meeting(3, PlanLayout(8, 2, 4, 1, 8, 8), DraftLayout(2, 4, 8), deadline_s=10.0)


class Worker:
    """Counts graphs; knows sizes 1, 2 and 4."""

    limits = Limits(16, 8, 4, 4, 16)

    def __init__(self, forgets: bool = False) -> None:
        self.captured: set[int] = set()
        self.forgets = forgets

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        wanted = set(buckets if buckets is not None else (1, 2, 4))
        if not wanted <= {1, 2, 4}:
            raise ValueError(f"capture: {wanted} are no buckets")
        self.captured |= set() if self.forgets else wanted
        return len(self.captured)

    def step(self, plan: Any) -> StepResult:
        rows = len(plan.out_rows)
        none = np.zeros((rows, 0))
        return StepResult(np.full(rows, plan.m, np.int32), np.zeros(rows, np.float32), np.ones(rows, np.bool_), none, none, 0.0)

    def draft(self, plan: Any) -> DraftLogits:
        raise RuntimeError("no drafter")

    def close(self) -> None:
        self.captured = set()


class Forked:
    """Peers that are forked at once and wait for the block's path."""

    def __init__(self, forgets: bool = False) -> None:
        self._children: dict[int, int] = {}
        self._pipes = {rank: os.pipe() for rank in (1, 2)}
        for rank, (ours, _) in self._pipes.items():
            child = os.fork()
            if child == 0:
                code = 1
                signal.alarm(60)  # ends it, should nobody tell it anything
                try:
                    block = SharedBlock.open(os.read(ours, 4096).decode())
                    follow(Worker(forgets and rank == 2), MEETING, block, rank)
                    code = 0
                finally:
                    os._exit(code)
            self._children[rank] = child

    def start(self, block_path: str) -> None:
        for _, theirs in self._pipes.values():
            os.write(theirs, block_path.encode())
        self._new = [RankEvent(rank, False) for rank in self._children]

    def events(self) -> list[RankEvent]:
        found, self._new = self._new, []
        for rank, child in list(self._children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del self._children[rank]
                found.append(RankEvent(rank, True, f"ended with {os.waitstatus_to_exitcode(status)}"))
        time.sleep(0.01)
        return found

    def kill(self) -> None:
        for child in self._children.values():
            os.kill(child, 9)


def test_sizes_reach_every_rank() -> None:
    own = Worker()
    ranks = CapturedRanks(MEETING, Forked(), lambda comm: own)
    assert ranks.capture([4, 1]) == 2 and own.captured == {1, 4}
    plan = make_plan([[1, 2, 3, 4]], [[-1, 0, 1, 2]], [0], page_table(1, 1))
    assert ranks.step(plan).target.tolist() == [4] * len(plan.out_rows)
    assert ranks.capture() == 3
    with pytest.raises(ValueError, match="are no buckets"):
        ranks.capture([3])
    assert ranks.trouble() is None, "nobody else heard of it"
    assert ranks.capture([2]) == 3
    ranks.close()
    assert ranks.trouble() == "the ranks were stopped"


def test_ranks_that_hold_other_graphs_are_found() -> None:
    ranks = CapturedRanks(MEETING, Forked(forgets=True), lambda comm: Worker())
    with pytest.raises(RankFailed, match="different numbers of graphs; rank 0 has 1"):
        ranks.capture([1])
    assert ranks.trouble() is not None
