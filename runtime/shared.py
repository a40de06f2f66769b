"""Memory that the processes of one host share, and how they wait for each other in it.

A block is anonymous (memfd): it has no name in /dev/shm, so nothing is left behind however its processes end. Others open it
by /proc/PID/fd/N while its maker lives, and keep it after.

Waiting is polling: a rank spins, then yields, then sleeps. Whoever learns that a rank is gone says so in one word of the block,
and everybody who waits raises PeerLost.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable

import numpy as np

from runtime.types import Array

LINE = 64  # bytes of a cache line: words of different writers never share one
YIELD_S = 0.002  # of yielding, then naps; with spinning 1 s
NAP_S = 50e-6
IDLE_S, IDLE_NAP_S = 10.0, 1e-3  # a group that has had nothing to do for 10 s takes 1 ms to wake and 0.5 % of a core
_POLLS = 64  # between two looks at the clock: 6 us


class PeerLost(RuntimeError):
    """A rank of this group has ended or does not answer."""


class SharedBlock:
    """Zeroed bytes that several processes map."""

    def __init__(self, fd: int, nbytes: int) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise RuntimeError(f"ranks that share memory need x86's order of stores; this machine is {platform.machine()}")
        self.nbytes = nbytes
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self.words = memoryview(self._map).cast("Q")  # 64 bits, one store each

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """A block of nbytes, rounded up to pages; only pages that are touched take memory."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    @classmethod
    def open(cls, path: str) -> SharedBlock:
        """Another process's block, by its `path`. Raises OSError if that process has ended."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, os.fstat(fd).st_size)

    def array(self, at: int, nbytes: int) -> Array:
        """Bytes [at, at + nbytes) as u8."""
        if not 0 <= at <= at + nbytes <= self.nbytes:
            raise ValueError(f"shared block: bytes {at} to {at + nbytes} of {self.nbytes}")
        return np.frombuffer(self._map, np.uint8, nbytes, at)

    def close(self) -> None:
        """Lets go of the descriptor; the memory stays as long as somebody holds a view of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Watch:
    """The word of a block that says which rank is gone, and waits that look at it. Takes LINE bytes at byte `at`.

    deadline_s: seconds that a peer may take to answer. spin_s: seconds of spinning before a wait yields its core: 0 where ranks
    compute on the cores they wait on, 0.05 where a device computes.
    """

    def __init__(self, block: SharedBlock, at: int, deadline_s: float, spin_s: float = 0.0) -> None:
        self._words, self._at = block.words, at // 8
        self._deadline_s, self._spin_s = deadline_s, spin_s
        self._nap_after_s = 1.0 if spin_s else YIELD_S

    @property
    def lost(self) -> int | None:
        """The rank that is gone, if one is."""
        word = self._words[self._at]
        return word - 1 if word else None

    def declare(self, rank: int) -> None:
        """Says that a rank is gone; the first to be named stays."""
        if not self._words[self._at]:
            self._words[self._at] = rank + 1

    def wait(self, ready: Callable[[], bool], what: str, patient: bool = False) -> None:
        """Returns once ready() holds. Raises PeerLost if a rank is gone, or unless `patient`, after the deadline."""
        begun, polls = time.monotonic(), 0
        while not ready():
            polls += 1
            if polls % _POLLS:
                continue
            if (lost := self.lost) is not None:
                raise PeerLost(f"rank {lost} is gone")
            waited_s = time.monotonic() - begun
            if waited_s > self._deadline_s and not patient:
                raise PeerLost(f"{what} for {waited_s:.0f} s (limit {self._deadline_s:g} s)")
            if waited_s > self._nap_after_s:
                time.sleep(NAP_S if waited_s < IDLE_S else IDLE_NAP_S)
                polls = _POLLS - 1
            elif waited_s >= self._spin_s:
                os.sched_yield()
                polls = _POLLS - 1
