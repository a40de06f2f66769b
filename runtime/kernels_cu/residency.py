"""Weights from files to a device: threads read into a ring of pinned buffers, each copied as soon as it is full.

    file -- preadv, threads --> slot (pinned) -- copy stream --> its place
                                              -- copy stream --> staging -- repack_w4 --> its place

Reads run ahead across tensors: `source` and `experts` return when their jobs are handed to the readers (`readers.py`), `settle`
when all has been enqueued and what the device does next comes after it. A window's columns are cut by the reader, so each slot is
one contiguous copy. Hashed windows are written by a kernel in the same order and touch no host memory.

A slot of 16 MiB holds gate and up of an expert of Kimi K2.6, or down of two, or a rank's gate and up of eight at TP 8: small
copies and launches cost Python's time. Copies of 16 MiB reach 54.6 of 55.4 GB/s on an H200's PCIe 5.0 x16, and a thread reads some 3 GB/s
from the page cache, so threads are what it takes. Repacking costs 4 % of the copy's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import numpy as np

from runtime.kernels_cu import fill, repack_w4
from runtime.kernels_cu.device import Device
from runtime.kernels_cu.link import Link
from runtime.kernels_cu.readers import Job, Readers
from runtime.source import ITEM_BYTES, FileWindow, HashWindow, Source, Triple, W4Source, Window
from runtime.w4 import GROUP, UNIT_BYTES, UNIT_ROWS

SLOT_BYTES = 16 << 20
SLOTS = 24
_ALIGN = 256


class Loader:
    """One device's stream of weights. Not for several threads. progress: told the bytes of each slot as it is sent, by a reader.
    readers: the threads at work, and where their time went."""

    def __init__(
        self, device: Device, link: Link, *, threads: int = 0, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._device, self._slot_bytes = device, slot_bytes
        threads = threads or min(15, os.cpu_count() or 1)  # 39.0 GB/s on an H200's host; 16 and 14: 38.0 (tools/bench_load.py)
        self.readers = Readers(link, threads=threads, slots=slots, slot_bytes=slot_bytes, progress=progress)
        self._staging = 0

    def source(self, source: Source, to: int) -> None:
        """Writes a weight's numbers, row after row, to a device address that `alloc` gave."""
        self.readers.begin()  # alloc's zeroes come first
        job: list[tuple[FileWindow, int]] = []
        first = used = read = done = 0
        for window in source.windows:
            row_bytes = window.shape[1] * ITEM_BYTES[window.dtype]
            if isinstance(window, HashWindow):
                self.readers.enqueue(self._fill(window, to + done))
                done += window.shape[0] * row_bytes
                continue
            if row_bytes > self._slot_bytes:
                raise ValueError(f"a row of {row_bytes} bytes in {window.path} is longer than a slot of {self._slot_bytes}")
            row, whole = 0, window.width * ITEM_BYTES[window.dtype]  # a row is read whole, then cut: no job reads more than a slot
            while row < window.shape[0]:
                if job and (read + whole > self._slot_bytes or first + used != done):
                    self.readers.submit(Job(tuple(job), used, to + first))
                    job, used, read = [], 0, 0
                if not job:
                    first = done
                rows = min(window.shape[0] - row, max(1, (self._slot_bytes - read) // whole))
                job.append((window.part(row, row + rows), used))
                row, used, read, done = row + rows, used + rows * row_bytes, read + rows * whole, done + rows * row_bytes
        if job:
            self.readers.submit(Job(tuple(job), used, to + first))

    def experts(self, source: W4Source, to: int) -> Callable[[], int]:
        """Packs experts to a device address; returns what gives their exponent, waiting for them."""
        largest = self._device.alloc(_ALIGN)
        self._staging = self._staging or self._device.alloc(self._slot_bytes)
        self.readers.begin()
        parts, groups = len(source.experts[0]), source.K // GROUP
        strips, room = source.N // UNIT_ROWS, self._slot_bytes - 2 * parts * _ALIGN
        most = room // (UNIT_ROWS * groups * (GROUP // 2 + 2))
        if not most:
            raise ValueError(f"64 rows of {source.K} INT4 inputs are more than a slot of {self._slot_bytes} bytes")
        read = sum(_read_bytes(t.words) + _read_bytes(t.scale) for t in source.experts[0])
        several = max(1, min(most // strips, self._slot_bytes // max(1, read)))  # experts in a slot, or else strips of one
        several = -(-source.E // -(-source.E // several))  # jobs of one size
        most = -(-strips // -(-strips // most))
        for e in range(0, source.E, several):
            chosen = source.experts[e : e + several]
            for strip in range(0, strips, most):
                rows = min(most, strips - strip) * UNIT_ROWS
                out = to + (e * strips + strip) * groups * UNIT_BYTES
                self.readers.submit(self._packing(chosen, source.K, strip * UNIT_ROWS // parts, rows // parts, out, largest))

        @cache
        def exponent() -> int:
            self.settle()
            bits = np.zeros(1, np.uint32)
            self._device.download(largest, bits)
            return repack_w4.exponent_of(int(bits[0]))

        return exponent

    def settle(self) -> None:
        """Enqueues all that is pending and lets the device's stream wait for it; the ring is kept for more."""
        self.readers.settle()

    def close(self) -> None:
        """Settles, and gives back the ring and the staging memory."""
        try:
            self.readers.close()
        finally:
            if self._staging:
                self._device.free(self._staging)
                self._staging = 0

    def _packing(self, experts: tuple[tuple[Triple, ...], ...], k: int, row: int, rows: int, out: int, largest: int) -> Job:
        """`rows` rows from `row` on of each part of some experts, one expert below the other, through staging. Several experts are
        packed as one of as many times the rows: where parts are woven, an expert's rows are a multiple of 16."""
        pieces: list[tuple[FileWindow, int]] = []
        then: list[Callable[[int], None]] = []
        places: list[int] = []
        used = 0
        for part in range(len(experts[0])):
            for kind in ("words", "scale"):
                places.append(self._staging + used)
                for triples in experts:
                    window = _only(getattr(triples[part], kind)).part(row, row + rows)
                    if isinstance(window, HashWindow):
                        then.append(self._fill(window, self._staging + used))
                    else:
                        pieces.append((window, used))
                    used += rows * window.shape[1] * ITEM_BYTES[window.dtype]
                used = -(-used // _ALIGN) * _ALIGN
        packed = rows * len(experts[0]) * len(experts)
        call = repack_w4.call(places[::2], places[1::2], out, largest, rows=packed, k=k)
        functions = self._device.functions(repack_w4.SOURCE, {}, repack_w4.ENTRIES)
        return Job(tuple(pieces), used, self._staging, (*then, self._device.prepare(call, functions).run))

    def _fill(self, window: HashWindow, at: int) -> Callable[[int], None]:
        functions = self._device.functions(fill.SOURCE, {}, fill.ENTRIES)
        return self._device.prepare(fill.call(window, at), functions).run


def _only(source: Source) -> Window:
    if len(source.windows) != 1:
        raise ValueError(f"INT4 words and scales lie in one window each, not in {len(source.windows)}")
    return source.windows[0]


def _read_bytes(source: Source) -> int:
    """What a reader fetches for a matrix: whole rows, also where columns are cut; nothing for hashed numbers."""
    return sum(w.shape[0] * w.width * ITEM_BYTES[w.dtype] for w in source.windows if isinstance(w, FileWindow))
