"""Collectives between ranks: alone, or threads of one process (the CPU's tensor parallelism).

A rank sums the parts in rank order, so all ranks hold the same bits and sample the same tokens
without a broadcast.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from runtime.types import Array

BARRIER_TIMEOUT_S = 120.0


class Comm(Protocol):
    """What a model needs of its peers."""

    rank: int
    world: int

    def all_reduce(self, x: Array) -> None:
        """x [M, H] bf16 becomes the sum over ranks, in place, rounded once."""

    def all_gather(self, x: Array, *, out: Array) -> None:
        """out [M, W * N] = the ranks' x [M, N], side by side in rank order."""


class SoloComm:
    """One rank: a sum of one, a row of one."""

    rank = 0
    world = 1

    def all_reduce(self, x: Array) -> None:
        return None

    def all_gather(self, x: Array, *, out: Array) -> None:
        out[:] = x


class ThreadComm:
    """One rank of several threads that share a list of parts and meet at a barrier.

    A rank that dies breaks the barrier, so the others raise BrokenBarrierError instead of waiting.
    """

    def __init__(self, rank: int, parts: list[Array | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world = len(parts)
        self._parts = parts
        self._barrier = barrier

    def _exchange(self, x: Array) -> Sequence[Array]:
        self._parts[self.rank] = x
        self._barrier.wait(BARRIER_TIMEOUT_S)
        return [part for part in self._parts if part is not None]

    def all_reduce(self, x: Array) -> None:
        parts = self._exchange(x)
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        self._barrier.wait(BARRIER_TIMEOUT_S)  # every rank has read every part
        x[:] = total

    def all_gather(self, x: Array, *, out: Array) -> None:
        out[:] = np.concatenate(self._exchange(x), axis=1)
        self._barrier.wait(BARRIER_TIMEOUT_S)

    def abort(self) -> None:
        """Frees the ranks that wait for this one."""
        self._barrier.abort()


def make_thread_comms(world: int) -> list[ThreadComm]:
    """Comms of `world` rank threads that meet each other."""
    parts: list[Array | None] = [None] * world
    barrier = threading.Barrier(world)
    return [ThreadComm(rank, parts, barrier) for rank in range(world)]
