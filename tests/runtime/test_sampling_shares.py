"""Ranks that hold a share of the vocabulary each draw what one rank draws from all of it, bit for bit, and tell each other little."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from runtime import sampling_shares
from runtime.kernels_np.sample import sample as define
from runtime.sampling_shares import Share, sample_share
from runtime.types import StepPlan
from tests.draws import Draws, adjusted, mixed

WORLDS = (2, 3, 8)


class Meeting:
    """What ranks, a thread each, tell each other; `numbers` counts what a rank told."""

    def __init__(self, world: int) -> None:
        self.world, self.numbers, self.rounds = world, 0, 0
        self._parts: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=20)

    def tell(self, rank: int) -> Callable[[np.ndarray], np.ndarray]:
        def tell(mine: np.ndarray) -> np.ndarray:
            self._parts[rank] = mine.copy()
            self._barrier.wait()
            heard = np.stack(self._parts, axis=1)
            self._barrier.wait()
            if rank == 0:
                self.numbers, self.rounds = self.numbers + mine.size, self.rounds + 1
            return heard

        return tell


def drawn(step: Draws, world: int) -> tuple[list[dict[str, np.ndarray]], Meeting]:
    """What each rank draws of its share."""
    meeting, size = Meeting(world), step.logits.shape[1] // world
    drawing = StepPlan.drawing.fget(step)  # type: ignore[attr-defined]

    def on_rank(rank: int) -> dict[str, np.ndarray]:
        found = step.outputs()
        own = np.ascontiguousarray(step.logits[:, rank * size : (rank + 1) * size])
        with np.errstate(all="ignore"):
            sample_share(meeting.tell(rank), Share(rank * size, size, world * size), own, drawing, **found)
        return found

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(on_rank, range(world))), meeting


def check(step: Draws, world: int) -> Meeting:
    ranks, meeting = drawn(step, world)
    want = step.defined(define)
    step.compare(ranks[0], want)
    for found in ranks[1:]:
        assert all(found[name].tobytes() == ranks[0][name].tobytes() for name in found), "all ranks hold the same bits"
    return meeting


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("grid", [False, True])
def test_tokens_are_those_of_one_rank(world: int, grid: bool) -> None:
    """Every filter alone and together, row by row; on a grid of halves most logits have equals on other ranks."""
    rng = np.random.default_rng(world)
    check(mixed(rng, 48, 120 * world, grid=grid), world)


@pytest.mark.parametrize("world", WORLDS)
def test_tables_and_masks_reach_the_rank_that_has_the_token(world: int) -> None:
    step = adjusted(np.random.default_rng(5), 24, 100 * world)
    check(step, world)
    bare = adjusted(np.random.default_rng(5), 24, 100 * world, bare=True)
    assert (bare.defined(define)["target"] != step.defined(define)["target"]).any()


def test_edges() -> None:
    rng = np.random.default_rng(1)
    flat = Draws(
        np.zeros((6, 64)), temperature=[0.0, 1.0, 1.0, 2.0, 1.0, 1.0], top_p=[1, 1, 0.5, 1e-6, 1, 1], top_k=[0, 0, 0, 0, 33, 64], top=64
    )
    check(flat, 2)
    banned = Draws(rng.standard_normal((3, 64)), mask_rows=[0, 2], masks=np.zeros((2, 2)), temperature=[1.0, 1.0, 0.0], top_p=0.9)
    check(banned, 4)
    far = Draws(np.where(np.arange(64) == 50, 0.0, -1e30)[None], temperature=0.1, top_p=0.99, min_p=1e-9)
    check(far, 4)


def test_a_row_that_one_rank_finds_broken_is_broken_on_all() -> None:
    step = mixed(np.random.default_rng(2), 12, 240)
    clean, _ = drawn(step, 2)
    step.logits[3, 200], step.logits[7, 5], step.logits[8, 6] = np.nan, np.inf, -np.inf
    found, _ = drawn(step, 2)
    assert np.flatnonzero(~found[0]["finite"]).tolist() == [3, 7, 8] and not found[0]["target"][[3, 7, 8]].any()
    others = np.setdiff1d(np.arange(12), [3, 7, 8])
    for one, two in zip(found, clean, strict=True):
        assert all(np.array_equal(one[name][others], two[name][others], equal_nan=True) for name in one)
    assert all(found[0][name].tobytes() == found[1][name].tobytes() for name in found[0])


def test_what_ranks_tell_each_other() -> None:
    """Rounds, and numbers of a row: never the share itself."""
    logits = np.random.default_rng(0).standard_normal((2, 16_384)) * 4
    told = {}
    ways = {"argmax": ("temperature", 0.0), "draw": ("top_k", 0), "min_p": ("min_p", 0.1), "top_k": ("top_k", 9), "top_p": ("top_p", 0.9)}
    for name, (field, value) in ways.items():
        meeting = check(Draws(logits, **{field: value}), 2)
        told[name] = (meeting.rounds, meeting.numbers // 2)
    assert told == {"argmax": (1, 5), "draw": (2, 8), "min_p": (2, 8), "top_k": (7, 5128), "top_p": (8, 5129)}


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the lower id of equals": ("_place", lambda real: lambda share, below, token: real(share, below, share.total - np.asarray(token))),
    "masses of one rank": ("_first_to_reach", lambda real: lambda tell, *rest: real(lambda mine: mine[:, None], *rest)),
    "scores of one rank": ("_race", lambda real: lambda share, d, kept, seed, pos: real(share, d, kept, seed, pos + share.first)),
    "own tokens by their whole number": ("_adjusted", lambda real: lambda share, *rest: real(Share(0, share.size, share.total), *rest)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, change = FAULTS[fault]
    monkeypatch.setattr(sampling_shares, name, change(getattr(sampling_shares, name)))
    with pytest.raises(AssertionError):
        for grid in (True, False):
            check(mixed(np.random.default_rng(3), 48, 240, grid=grid), 2)
        check(adjusted(np.random.default_rng(5), 24, 200), 2)


def test_logits_of_another_share_are_refused() -> None:
    step = mixed(np.random.default_rng(0), 4, 64)
    with pytest.raises(ValueError, match=r"logits \[4, 64\] of 4 rows and 32 tokens"):
        sample_share(lambda mine: mine[:, None], Share(0, 32, 64), step.logits, StepPlan.drawing.fget(step), **step.outputs())  # type: ignore[attr-defined]
