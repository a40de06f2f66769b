"""Threads that fill pinned slots from files and send each as soon as it is full; where their time goes.

A thread takes a job, waits for a slot, reads with as few calls as the file allows, and leaves the slot to whoever is enqueueing;
where nobody is, it does that itself. So none waits for its turn: readers that did, on an H200, spent 20 % of their time there,
1.5 ms a slot, as the one in front had given Python's lock away in its launch. What costs here is that lock: 16 threads that read
54 GB/s finish 3,300 slots of 16 MiB a second, 300 us for each, and every system call hands the lock away. So a slot takes one
`preadv` where its windows lie side by side, and enqueueing a copy keeps the lock (`link`). While weights are read, a thread asks
for the lock after 50 us instead of the 5 ms that Python grants its holder: with 5 ms, naming 1,152 triples starves the readers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from runtime.kernels_cu.link import U8, Link
from runtime.source import ITEM_BYTES, FileWindow

AHEAD = 256  # jobs under way: 4 GB, 80 ms, twice what a layer of Kimi K2.6 needs to be named and w_uk to be turned
CUT_BYTES = 4 << 20  # of whole rows read at once where columns are cut
GAP_BYTES = 4096  # between windows of a file, read along: a shape of 8 bytes between words and scales
_BUFFERS = 512  # of one preadv; Linux takes 1,024
SWITCH_S = 50e-6


@dataclass(frozen=True, slots=True)
class Job:
    """One slot's worth: windows at their places in the slot, where the slot goes, what runs after the copy."""

    pieces: tuple[tuple[FileWindow, int], ...]
    nbytes: int
    to: int
    then: tuple[Callable[[int], None], ...] = ()


@dataclass(slots=True)
class Spent:
    """Where a thread's time went, in seconds. jobs: waiting for one, as none is named. slots: waiting for one, as copies are
    behind. reading: in system calls and cutting columns; `busy`: on a core meanwhile, the rest waits for a disk or Python's lock.
    sending: enqueueing slots, its own and others'; `late`: the sum of what those had waited for that since they were full.
    nbytes: put into `filled` slots by `calls` runs of a file."""

    jobs: float = 0.0
    slots: float = 0.0
    reading: float = 0.0
    busy: float = 0.0
    sending: float = 0.0
    late: float = 0.0
    nbytes: int = 0
    calls: int = 0
    filled: int = 0


class Readers:
    """A ring of pinned slots and its threads. Jobs are sent in any order, each with what runs after it in one piece.

    `submit`, `settle` and `close` are for one thread. spent: of each reader. ahead: seconds that `submit` waited.
    """

    def __init__(self, link: Link, *, threads: int, slots: int, slot_bytes: int, progress: Callable[[int], None]) -> None:
        self._link, self._progress = link, progress
        self._slots = [link.pinned(slot_bytes) for _ in range(slots)]
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # a semaphore's own lock is one more to wait for
        for _ in range(AHEAD):
            self._room.put(None)
        self._full: deque[tuple[Job, int, float]] = deque()  # read, with slot and time; to be sent by who holds `_order`
        self._order = threading.Lock()  # held while copies and launches are enqueued
        self._files = Files()
        self._fault: BaseException | None = None
        self.spent = [Spent() for _ in range(threads)]
        self.ahead = 0.0
        _hurry(1)
        self._threads = [threading.Thread(target=self._serve, args=(s,), name="weights", daemon=True) for s in self.spent]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Has a job read and sent; waits while `AHEAD` are under way. Raises what a reader met."""
        start = time.perf_counter()
        self._room.get()
        self.ahead += time.perf_counter() - start
        self._jobs.put(job)
        self._raise()

    def enqueue(self, *runs: Callable[[int], None]) -> None:
        """Launches on the link's stream, between jobs."""
        with self._turn():
            for run in runs:
                run(self._link.stream)

    def begin(self) -> None:
        """What is submitted from now on is copied after what the device's stream holds."""
        with self._turn():
            self._link.begin()

    def settle(self) -> None:
        """Returns when all jobs are enqueued; the device's stream waits for them. Raises what a reader met."""
        taken = 0
        try:
            self._send(Spent())  # what an interrupted turn has left
            while taken < AHEAD:
                self._room.get()
                taken += 1
        finally:  # also when interrupted: close settles again
            for _ in range(taken):
                self._room.put(None)
        self._raise()
        with self._turn():
            self._link.end()

    def close(self) -> None:
        """Settles, and gives back threads, files and slots."""
        try:
            self.settle()
        finally:
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join()
            if self._threads:
                _hurry(-1)
            self._threads = []
            self._link.close()
            self._files.close()
            self._slots = []

    def _raise(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _serve(self, spent: Spent) -> None:
        self._link.use()
        while True:
            start = time.perf_counter()
            job = self._jobs.get()
            if job is None:
                return
            spent.jobs += time.perf_counter() - start
            try:
                if self._fault is None and job.pieces:
                    self._read(job, spent)  # who sends it makes room
                    self._send(spent)
                    continue
                if self._fault is None:
                    self.enqueue(*job.then)
            except BaseException as fault:  # told by the next submit or settle
                self._fault = self._fault or fault
            self._room.put(None)

    def _read(self, job: Job, spent: Spent) -> None:
        start = time.perf_counter()
        slot = self._free.get()
        try:
            self._link.wait(slot)
            free, core = time.perf_counter(), time.thread_time()
            spent.calls += self._files.read(job.pieces, self._slots[slot])
        except BaseException:
            self._free.put(slot)
            raise
        spent.busy += time.thread_time() - core
        full = time.perf_counter()
        spent.slots += free - start
        spent.reading += full - free
        spent.nbytes += job.nbytes
        spent.filled += 1
        self._full.append((job, slot, full))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """What the calling thread enqueues itself, and then what readers could not meanwhile."""
        try:
            with self._order:
                yield
        finally:
            self._send(Spent())

    def _send(self, spent: Spent) -> None:
        """Enqueues what is full, unless another thread is at it: that one looks again after it has let go."""
        while self._full and self._order.acquire(blocking=False):
            start = time.perf_counter()
            try:
                while self._full:
                    self._send_first(spent)
            finally:
                self._order.release()
            spent.sending += time.perf_counter() - start

    def _send_first(self, spent: Spent) -> None:
        job, slot, full = self._full[0]  # stays until it is sent: an interrupted main thread loses none
        try:
            spent.late += time.perf_counter() - full
            if self._fault is None:
                self._link.send(self._slots[slot][: job.nbytes], job.to)
                self._link.mark(slot)
                for run in job.then:
                    run(self._link.stream)
                self._progress(job.nbytes)
        except BaseException as fault:
            self._fault = self._fault or fault
        finally:
            self._full.popleft()
            self._free.put(slot)
            self._room.put(None)


class Files:
    """Open files by path, read by several threads."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, pieces: tuple[tuple[FileWindow, int], ...], slot: U8) -> int:
        """Each window, contiguous, at its place in the slot; returns how many runs of a file that took.

        Raises ValueError where a file is shorter than it was.
        """
        count = 0
        for path, start, buffers in self._runs(pieces, slot):
            self._fill(path, start, buffers)
            count += 1
        for window, at in pieces:
            if window.shape[1] != window.width:
                count += self._cut(window, slot[at:])
        return count

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open = {}

    def _runs(self, pieces: tuple[tuple[FileWindow, int], ...], slot: U8) -> Iterator[tuple[Path, int, list[memoryview]]]:
        """Windows of whole rows, joined where they lie at most GAP_BYTES apart: path, first byte, where the bytes go."""
        view = slot.data
        path, first, end = Path(), 0, 0
        buffers: list[memoryview] = []
        for window, at in sorted(pieces, key=_place):
            if window.shape[1] != window.width:
                continue
            step = window.width * ITEM_BYTES[window.dtype]
            start, size = window.start + window.rows[0] * step, (window.rows[1] - window.rows[0]) * step
            if buffers and not (path is window.path and 0 <= start - end <= GAP_BYTES and len(buffers) < _BUFFERS):
                yield path, first, buffers
                buffers = []
            if not buffers:
                path, first = window.path, start
            elif start > end:
                buffers.append(self._scratch(GAP_BYTES)[: start - end].data)
            buffers.append(view[at : at + size])
            end = start + size
        if buffers:
            yield path, first, buffers

    def _cut(self, window: FileWindow, out: U8) -> int:
        """Columns of a window, from whole rows; returns how many reads that took."""
        rows, cols = window.shape
        item = ITEM_BYTES[window.dtype]
        step, left = window.width * item, window.cols[0] * item
        start = window.start + window.rows[0] * step
        each = max(1, CUT_BYTES // step)
        for row in range(0, rows, each):
            count = min(each, rows - row)
            whole = self._scratch(each * step)[: count * step]
            self._fill(window.path, start + row * step, [whole.data])
            part = out[row * cols * item : (row + count) * cols * item].reshape(count, cols * item)
            part[...] = whole.reshape(count, step)[:, left : left + cols * item]
        return -(-rows // each)

    def _scratch(self, nbytes: int) -> U8:
        """A thread's own memory of at least that size."""
        have: U8 | None = getattr(self._own, "scratch", None)
        if have is None or have.nbytes < nbytes:
            self._own.scratch = have = np.empty(nbytes, np.uint8)
        return have

    def _fill(self, path: Path, start: int, buffers: list[memoryview]) -> None:
        file = self._open.get(path)
        if file is None:
            with self._lock:
                if path not in self._open:
                    self._open[path] = os.open(path, os.O_RDONLY)
                file = self._open[path]
        left = sum(b.nbytes for b in buffers)
        while left:
            got = os.preadv(file, buffers, start)
            if not got:
                raise ValueError(f"{path} ends at byte {start}, before {left} bytes of a weight; it has changed")
            start, left = start + got, left - got
            while buffers and got >= buffers[0].nbytes:
                got -= buffers.pop(0).nbytes
            if buffers:
                buffers[0] = buffers[0][got:]


def _place(piece: tuple[FileWindow, int]) -> tuple[int, int]:
    """Orders pieces as they lie in their files: down's words and scales of two experts take two calls, not four."""
    window = piece[0]
    return id(window.path), window.start + window.rows[0] * window.width * ITEM_BYTES[window.dtype]


_hurried = [0, 0.0]  # how many rings are at work, and the interval before the first
_hurry_lock = threading.Lock()


def _hurry(rings: int) -> None:
    """Shortens the interval after which a thread asks for Python's lock while there are rings."""
    with _hurry_lock:
        if not _hurried[0]:
            _hurried[1] = sys.getswitchinterval()
        _hurried[0] += rings
        sys.setswitchinterval(SWITCH_S if _hurried[0] else _hurried[1])
