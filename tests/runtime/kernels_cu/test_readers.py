"""Readers of files: runs of a file joined into one call, calls that return early, faults, and what they leave behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

from runtime.kernels_cu.readers import AHEAD, GAP_BYTES, Files, Job, Readers
from runtime.source import FileWindow
from tests.host_link import HostLink

SIZE = 40_000


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes())
    return file


def rows(path, start, count, width=100):
    return FileWindow(path, start, "u8", width, (0, count), (0, width))


def readers(link, **how):
    return Readers(link, **{"threads": 3, "slots": 4, "slot_bytes": SIZE, "progress": lambda _: None} | how)


@pytest.mark.parametrize(("gap", "calls"), [(0, 1), (8, 1), (GAP_BYTES, 1), (GAP_BYTES + 1, 2), (-100, 2)])
def test_windows_near_each_other_take_one_call(path, gap, calls):
    """A file goes forward only, and what lies between windows is read along up to GAP_BYTES."""
    data, slot = path.read_bytes(), np.zeros(SIZE, np.uint8)
    second = 1000 + 2000 + gap
    assert Files().read(((rows(path, 1000, 20), 0), (rows(path, second, 5), 2048)), slot) == calls
    assert slot[:2000].tobytes() == data[1000:3000] and slot[2048:2548].tobytes() == data[second : second + 500]
    assert not slot[2000:2048].any() and not slot[2548:].any()


def test_cut_columns_stand_beside_whole_rows(path):
    data, slot = np.frombuffer(path.read_bytes(), np.uint8), np.zeros(SIZE, np.uint8)
    cut = FileWindow(path, 0, "u8", 100, (10, 30), (7, 19))
    assert Files().read(((rows(path, 0, 10), 0), (cut, 1024), (rows(path, 1000, 10), 2048)), slot) == 2
    np.testing.assert_array_equal(slot[1024 : 1024 + 240].reshape(20, 12), data[1000:3000].reshape(20, 100)[:, 7:19])
    np.testing.assert_array_equal(np.concatenate([slot[:1000], slot[2048:3048]]), data[:2000])


def test_windows_are_read_in_the_order_of_the_file(path):
    """Words of two matrices, then scales of both, as a slot holds them: two calls where the file has words beside scales."""
    data, slot = path.read_bytes(), np.zeros(SIZE, np.uint8)
    pieces = [(rows(path, at, count), to) for at, count, to in ((0, 50, 0), (20_000, 50, 5000), (5000, 5, 10_000), (25_000, 5, 10_500))]
    assert Files().read(tuple(pieces), slot) == 2
    assert slot[:11_000].tobytes() == data[:5000] + data[20_000:25_000] + data[5000:5500] + data[25_000:25_500]


@pytest.mark.parametrize("most", [1, 333, 2000, 2001])
def test_a_call_that_returns_early_is_continued(path, monkeypatch, most):
    whole = os.preadv

    def early(file, buffers, start):
        left, fewer = most, []
        for buffer in buffers:
            fewer.append(buffer[:left])
            left -= len(fewer[-1])
        return whole(file, fewer, start)

    monkeypatch.setattr(os, "preadv", early)
    slot = np.zeros(SIZE, np.uint8)
    Files().read(((rows(path, 1000, 20), 0), (rows(path, 3008, 5), 2048)), slot)
    data = path.read_bytes()
    assert slot[:2000].tobytes() == data[1000:3000] and slot[2048:2548].tobytes() == data[3008:3508]


def test_more_jobs_than_may_be_under_way(path):
    """Each lands where it should and is followed by its launches before the next copy; the time is accounted for."""
    link, out, told = HostLink(late=True), np.zeros((2 * AHEAD, 100), np.uint8), []
    data = np.frombuffer(path.read_bytes(), np.uint8)
    ring = readers(link, progress=told.append)
    seen: list[int] = []
    for i in range(2 * AHEAD):
        ring.submit(Job(((rows(path, 10 * i, 1), 0),), 100, out[i].ctypes.data, (lambda _: seen.append(link.sent),)))
    ring.close()
    np.testing.assert_array_equal(out, np.stack([data[10 * i : 10 * i + 100] for i in range(2 * AHEAD)]))
    assert seen == list(range(1, 2 * AHEAD + 1)) and sum(told) == sum(s.nbytes for s in ring.spent) == out.nbytes
    assert sum(s.filled for s in ring.spent) == sum(s.calls for s in ring.spent) == 2 * AHEAD
    assert all(s.reading > 0 for s in ring.spent if s.filled) and sum(s.sending for s in ring.spent) > 0


def until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_no_reader_waits_for_another_to_send(path):
    """While one is held up in its launch the others read on, until slots run out; what they read it sends, in that order."""
    link, out, held = HostLink(), np.zeros((8, 100), np.uint8), threading.Event()
    ring = readers(link)
    by: list[int] = []

    def launch(_):
        by.append(threading.get_ident())
        assert held.wait(10)

    for i in range(8):
        ring.submit(Job(((rows(path, 100 * i, 1), 0),), 100, out[i].ctypes.data, (launch,)))
    until(lambda: len(ring._full) == 4)
    assert len(by) == link.sent == 1
    held.set()
    ring.settle()
    assert len(by) == link.sent == 8 and len(set(by[:4])) == 1 and not ring._full
    assert out.tobytes() == path.read_bytes()[:800] and sum(s.late for s in ring.spent) > 0
    ring.close()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_read_while_the_main_thread_enqueues_is_sent(path, fails):
    """By the main thread, when it is done or its launch has failed: no reader comes again for it."""
    link, out = HostLink(), np.zeros(100, np.uint8)
    ring = readers(link)

    def launch(_):
        ring.submit(Job(((rows(path, 300, 1), 0),), 100, out.ctypes.data))
        until(lambda: ring._full)
        time.sleep(0.01)  # its reader has tried
        assert not link.sent
        if fails:
            raise OSError("launch of hash_i32")

    with pytest.raises(OSError, match="launch of hash_i32") if fails else nullcontext():
        ring.enqueue(launch)
    until(lambda: link.sent == 1)
    ring.close()
    assert out.tobytes() == path.read_bytes()[300:400]


def test_an_interrupted_main_thread_leaves_nothing_unsent(path, monkeypatch):
    link, out = HostLink(), np.zeros(100, np.uint8)
    ring = readers(link)
    first = Readers._send_first

    def interrupted(ring, spent):
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(Readers, "_send_first", first)
            raise KeyboardInterrupt
        first(ring, spent)

    def launch(_):
        ring.submit(Job(((rows(path, 300, 1), 0),), 100, out.ctypes.data))
        until(lambda: ring._full)
        time.sleep(0.01)  # its reader has tried
        monkeypatch.setattr(Readers, "_send_first", interrupted)

    with pytest.raises(KeyboardInterrupt):
        ring.enqueue(launch)
    assert not link.sent
    ring.close()
    assert link.sent == 1


def test_a_fault_while_sending_is_told_and_frees_the_slot(path):
    link, out = HostLink(), np.zeros(100, np.uint8)
    ring = readers(link, slots=1)

    def launch(_):
        raise OSError("launch of repack_w4")

    ring.submit(Job(((rows(path, 0, 1), 0),), 100, out.ctypes.data, (launch,)))
    with pytest.raises(OSError, match="launch of repack_w4"):
        ring.settle()
    until(lambda: ring._free.qsize() == 1)
    with pytest.raises(OSError, match="launch of repack_w4"):
        ring.close()
    assert link.closed


def test_a_fault_is_told_and_nothing_stays_behind(path):
    before = sys.getswitchinterval()
    link, out = HostLink(), np.zeros(200, np.uint8)
    ring = readers(link)
    assert sys.getswitchinterval() < before
    ring.submit(Job(((rows(path, SIZE - 100, 2), 0),), 200, out.ctypes.data))
    with pytest.raises(ValueError, match=rf"weights.bin ends at byte {SIZE}, before 100 bytes of a weight"):
        ring.settle()
    with pytest.raises(ValueError, match=r"weights.bin ends"):
        ring.submit(Job(((rows(path, 0, 2), 0),), 200, out.ctypes.data))
    with pytest.raises(ValueError, match=r"weights.bin ends"):
        ring.close()
    assert link.closed and not link.sent and not out.any() and sys.getswitchinterval() == before
