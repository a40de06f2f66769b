"""Weights from files to a device: threads read into a ring of pinned buffers, each copied as soon as it is full.

    file -- preadv, threads --> slot (pinned) -- copy stream --> its place
                                              -- copy stream --> staging -- repack_w4 --> its place

Reads run ahead across tensors: `source` and `experts` return when their last read is under way, `settle` when all has been
enqueued and what the device does next comes after it. A window's columns are cut by the reader, so each slot is one contiguous
copy. Hashed windows are written by a kernel in the same order and touch no host memory.

A slot of 16 MiB holds gate and up of an expert of Kimi K2.6; copies of 16 MiB reach 54.6 of 55.4 GB/s on an H200's PCIe 5.0 x16,
and a thread reads some 3 GB/s from the page cache, so threads are what it takes. Repacking costs 4 % of the copy's time.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from runtime.kernels_cu import fill, repack_w4
from runtime.kernels_cu.device import Device
from runtime.kernels_cu.link import U8, Link
from runtime.source import ITEM_BYTES, FileWindow, HashWindow, Source, W4Source, Window
from runtime.w4 import GROUP, UNIT_BYTES, UNIT_ROWS

SLOT_BYTES = 16 << 20
SLOTS = 24
CUT_BYTES = 4 << 20  # of whole rows read at once where columns are cut
_ALIGN = 256


@dataclass(frozen=True, slots=True)
class Job:
    """One slot's worth: windows at their places in the slot, where the slot goes (0: staging), what runs after the copy."""

    pieces: tuple[tuple[FileWindow, int], ...]
    nbytes: int
    to: int
    then: tuple[Callable[[int], None], ...] = ()


class Loader:
    """One device's stream of weights. Not for several threads. progress: told the bytes of each slot as it is sent."""

    def __init__(
        self, device: Device, link: Link, *, threads: int = 0, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._device, self._link, self._progress = device, link, progress
        self._slot_bytes, self._slots = slot_bytes, [link.pinned(slot_bytes) for _ in range(slots)]
        self._pool = ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1), "weights")
        self._files = _Files()
        self._pending: deque[tuple[Job, int, Future[None]]] = deque()
        self._count = 0
        self._staging = 0

    def source(self, source: Source, to: int) -> None:
        """Writes a weight's numbers, row after row, to a device address that `alloc` gave."""
        self._link.begin()  # alloc's zeroes come first
        job: list[tuple[FileWindow, int]] = []
        first = used = done = 0
        for window in source.windows:
            row_bytes = window.shape[1] * ITEM_BYTES[window.dtype]
            if isinstance(window, HashWindow):
                self._fill(window, to + done)(self._link.stream)
                done += window.shape[0] * row_bytes
                continue
            if row_bytes > self._slot_bytes:
                raise ValueError(f"a row of {row_bytes} bytes in {window.path} is longer than a slot of {self._slot_bytes}")
            row = 0
            while row < window.shape[0]:
                if job and (used + row_bytes > self._slot_bytes or first + used != done):
                    self._submit(Job(tuple(job), used, to + first))
                    job, used = [], 0
                if not job:
                    first = done
                rows = min(window.shape[0] - row, (self._slot_bytes - used) // row_bytes)
                job.append((window.part(row, row + rows), used))
                row, used, done = row + rows, used + rows * row_bytes, done + rows * row_bytes
        if job:
            self._submit(Job(tuple(job), used, to + first))

    def experts(self, source: W4Source, to: int) -> Callable[[], int]:
        """Packs experts to a device address; returns what gives their exponent, waiting for them."""
        largest = self._device.alloc(_ALIGN)
        self._staging = self._staging or self._device.alloc(self._slot_bytes)
        self._link.begin()
        parts, groups = len(source.experts[0]), source.K // GROUP
        strips, room = source.N // UNIT_ROWS, self._slot_bytes - 2 * parts * _ALIGN
        most = room // (UNIT_ROWS * groups * (GROUP // 2 + 2))
        if not most:
            raise ValueError(f"64 rows of {source.K} INT4 inputs are more than a slot of {self._slot_bytes} bytes")
        most = -(-strips // -(-strips // most))  # jobs of one size
        for e in range(source.E):
            for strip in range(0, strips, most):
                rows = min(most, strips - strip) * UNIT_ROWS
                out = to + (e * strips + strip) * groups * UNIT_BYTES
                self._submit(self._packing(source, e, strip * UNIT_ROWS // parts, rows, out, largest))

        @cache
        def exponent() -> int:
            self.settle()
            bits = np.zeros(1, np.uint32)
            self._device.download(largest, bits)
            return repack_w4.exponent_of(int(bits[0]))

        return exponent

    def settle(self) -> None:
        """Enqueues all that is pending and lets the device's stream wait for it; the ring is kept for more."""
        while self._pending:
            self._send()
        self._link.end()

    def close(self) -> None:
        """Settles, and gives back the ring and the staging memory."""
        try:
            self.settle()
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._link.close()
            self._files.close()
            self._slots = []
            if self._staging:
                self._device.free(self._staging)
                self._staging = 0

    def _packing(self, source: W4Source, expert: int, row: int, rows: int, out: int, largest: int) -> Job:
        """Rows from `row` on of each part of an expert, as many as make `rows` packed ones, through staging."""
        pieces: list[tuple[FileWindow, int]] = []
        then: list[Callable[[int], None]] = []
        words: list[int] = []
        scale: list[int] = []
        used = 0
        for triple in source.experts[expert]:
            for part, places in ((triple.words, words), (triple.scale, scale)):
                window = _only(part).part(row, row + rows // len(source.experts[0]))
                if isinstance(window, HashWindow):
                    then.append(self._fill(window, self._staging + used))
                else:
                    pieces.append((window, used))
                places.append(self._staging + used)
                used += -(-window.shape[0] * window.shape[1] * ITEM_BYTES[window.dtype] // _ALIGN) * _ALIGN
        call = repack_w4.call(words, scale, out, largest, rows=rows, k=source.K)
        functions = self._device.functions(repack_w4.SOURCE, {}, repack_w4.ENTRIES)
        return Job(tuple(pieces), used, 0, (*then, self._device.prepare(call, functions).run))

    def _fill(self, window: HashWindow, at: int) -> Callable[[int], None]:
        functions = self._device.functions(fill.SOURCE, {}, fill.ENTRIES)
        return self._device.prepare(fill.call(window, at), functions).run

    def _submit(self, job: Job) -> None:
        """Starts reading a job as soon as its slot is free, and sends what has been read meanwhile."""
        slot, self._count = self._count % len(self._slots), self._count + 1
        while self._pending and (len(self._pending) >= len(self._slots) - 1 or self._pending[0][2].done()):
            self._send()
        self._link.wait(slot)
        future: Future[None]
        if job.pieces:
            future = self._pool.submit(self._files.read, job.pieces, self._slots[slot])
        else:
            future = Future()
            future.set_result(None)
        self._pending.append((job, slot, future))

    def _send(self) -> None:
        job, slot, future = self._pending.popleft()
        future.result()
        if job.pieces:
            self._link.send(self._slots[slot][: job.nbytes], job.to or self._staging)
            self._link.mark(slot)
        for run in job.then:
            run(self._link.stream)
        self._progress(job.nbytes)


class _Files:
    """Open files by path, read by several threads."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, pieces: tuple[tuple[FileWindow, int], ...], slot: U8) -> None:
        """Each window, contiguous, at its place in the slot. Raises ValueError where a file is shorter than it was."""
        for window, at in pieces:
            rows, cols = window.shape
            item = ITEM_BYTES[window.dtype]
            out = slot[at : at + rows * cols * item]
            step, left = window.width * item, window.cols[0] * item
            start = window.start + window.rows[0] * step
            if cols == window.width:
                self._fill(window.path, out, start)
                continue
            each = max(1, CUT_BYTES // step)
            if getattr(self._own, "scratch", None) is None or self._own.scratch.nbytes < each * step:
                self._own.scratch = np.empty(each * step, np.uint8)
            for row in range(0, rows, each):
                count = min(each, rows - row)
                whole = self._own.scratch[: count * step]
                self._fill(window.path, whole, start + row * step)
                part = out[row * cols * item : (row + count) * cols * item].reshape(count, cols * item)
                part[...] = whole.reshape(count, step)[:, left : left + cols * item]

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open = {}

    def _fill(self, path: Path, out: U8, start: int) -> None:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            file = self._open[path]
        done = 0
        while done < out.nbytes:
            got = os.preadv(file, [out[done:].data], start + done)
            if not got:
                raise ValueError(f"{path} ends at byte {start + done}, before {out.nbytes - done} bytes of a weight; it has changed")
            done += got


def _only(source: Source) -> Window:
    if len(source.windows) != 1:
        raise ValueError(f"INT4 words and scales lie in one window each, not in {len(source.windows)}")
    return source.windows[0]
