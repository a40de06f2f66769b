"""The ring of plans: nothing torn, nothing lost, nothing left behind, however often it starts and whoever dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.env import load_env
from runtime.ring import DRAFT, SLOTS, STEP, STOP, PlanRing
from runtime.shared import LINE, PeerLost, SharedBlock, Watch
from tests.forks import on_ranks

RECORD = 4096
RESTARTS = {1: 20, 2: 100, 3: 500}


def make_ring(block: SharedBlock, readers: int, deadline_s: float = 20.0) -> PlanRing:
    return PlanRing(block, LINE, RECORD, readers, Watch(block, 0, deadline_s))


def block_for(readers: int) -> SharedBlock:
    return SharedBlock.create(LINE + PlanRing.nbytes(RECORD, readers))


def write(ring: PlanRing, kind: int, value: int) -> None:
    ring.record().view(np.uint32)[:] = value
    ring.publish(kind)


def exchange(readers: int, records: int) -> list[list[int]]:
    """Rank 0 writes records filled with their number; readers answer with the square of what they saw everywhere in it."""
    block = block_for(readers)

    def run(rank: int) -> list[int]:
        ring = make_ring(block, readers)
        if rank == 0:
            heard = []
            for n in range(1, records + 1):
                write(ring, STEP if n % 2 else DRAFT, n)
                if n % 3 == 0:  # the others run on by up to SLOTS records
                    heard.append(ring.answers())
            write(ring, STOP, 0)
            assert all(answers == [n * n] * readers for n, answers in zip(range(3, records + 1, 3), heard, strict=True))
            return []
        seen = []
        while True:
            kind, record = ring.next()
            words = record.view(np.uint32)
            assert (words == words[0]).all(), "a torn record"
            value = int(words[0])
            ring.finish(rank - 1, value * value)
            if kind == STOP:
                return seen
            assert kind == (STEP if value % 2 else DRAFT)
            seen.append(value)

    return on_ranks(readers + 1, run)[1:]


@pytest.mark.parametrize("readers", [1, 3])
def test_every_reader_sees_every_record_whole_and_in_order(readers: int) -> None:
    assert exchange(readers, 500) == [list(range(1, 501))] * readers


def test_restarts_never_hang() -> None:
    for _ in range(RESTARTS[load_env().test_level]):
        assert exchange(2, 9) == [list(range(1, 10))] * 2


def test_a_writer_does_not_overtake_a_reader_by_more_than_the_slots() -> None:
    block = block_for(1)
    ring, reader = make_ring(block, 1, deadline_s=0.2), make_ring(block, 1)
    for n in range(SLOTS):
        write(ring, STEP, n)
    with pytest.raises(PeerLost, match="rank 1 has not finished record 1 for"):
        ring.record()
    kind, record = reader.next()
    assert (kind, record.view(np.uint32)[0]) == (STEP, 0)
    reader.finish(0)
    write(ring, STEP, 99)
    assert reader.next()[1].view(np.uint32)[0] == 1


def test_a_killed_reader_frees_the_writer_and_a_killed_writer_the_readers() -> None:
    block = block_for(1)

    def run(rank: int) -> str:
        ring = make_ring(block, 1)
        if rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    ring.next()
                    time.sleep(60)
                finally:
                    os._exit(1)  # or it would go on as rank 0, whose child has the number 0: everybody's
            write(ring, STEP, 1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            Watch(block, 0, 1.0).declare(1)
        with pytest.raises(PeerLost) as lost:
            ring.answers() if rank == 0 else [ring.next() for _ in range(2)]
        return str(lost.value)

    assert on_ranks(2, run) == ["rank 1 is gone"] * 2


def test_a_block_has_no_name_and_is_opened_by_path() -> None:
    before = set(os.listdir("/dev/shm"))
    block = SharedBlock.create(5000)
    assert set(os.listdir("/dev/shm")) == before
    assert block.nbytes == 8192
    other = SharedBlock.open(block.path)
    block.words[3] = 77
    assert other.words[3] == 77 and other.array(24, 8).view(np.uint64)[0] == 77
    with pytest.raises(ValueError, match="bytes 8000 to 9000 of 8192"):
        block.array(8000, 1000)
    path = Path(block.path)
    block.close()
    block.close()
    assert not path.exists()
    assert other.words[3] == 77, "the memory stays while somebody holds it"


def test_an_idle_wait_sleeps() -> None:
    block = block_for(1)
    watch = Watch(block, 0, 60.0)
    end = time.monotonic() + 0.5
    busy = time.process_time()
    watch.wait(lambda: time.monotonic() > end, "nothing")
    assert time.process_time() - busy < 0.25
