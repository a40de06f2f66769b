"""The server over two rank processes: one is killed or stops answering in the middle of a step, or all goes well."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from model.tiny import make_tiny
from server.client import ServerRefused
from tests.tools.test_serve import Process, start, until
from tests.tools.test_serve_life import stream


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("ranks") / "tiny"))


def rank_processes(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def health(process: Process) -> int:
    try:
        process.http.get("/health")
    except ServerRefused as refused:
        return refused.status
    except OSError:
        return 0
    return 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_all_within_10_s(tiny: str, number: signal.Signals) -> None:
    shm = set(os.listdir("/dev/shm"))
    process = start(tiny, "--tensor-parallel-size", "2", "--watchdog-timeout", "2")
    (rank,) = rank_processes(process.popen.pid)
    seen: list[int] = []

    async def run() -> tuple[list[str], float, float]:
        begun: list[int] = []
        asked = [asyncio.create_task(stream(process.url, 5000, begun, f"{i} abc")) for i in range(4)]
        while len(begun) < 4:
            await asyncio.sleep(0.01)
        os.kill(rank, number)
        struck_s = time.monotonic()
        answers = asyncio.gather(*asked)
        while not answers.done() or (503 not in seen and seen[-1:] != [0]):
            seen.append(await asyncio.to_thread(health, process))
            await asyncio.sleep(0.02)
        return await answers, struck_s, time.monotonic()

    texts, struck_s, told_s = asyncio.run(asyncio.wait_for(run(), 60))
    assert all('"error":' in text and text.rstrip().endswith("data: [DONE]") for text in texts)
    assert not any("rank" in text or "signal" in text for text in texts), "causes go to the log, not to clients"
    assert 503 in seen
    assert process.popen.wait(15) == 1
    ended_s = time.monotonic()
    print(f"\n{number.name}: clients told after {told_s - struck_s:.2f} s, the process ended after {ended_s - struck_s:.2f} s")
    assert ended_s - struck_s < 10
    assert until(lambda: is_gone(rank), 2.0)
    assert set(os.listdir("/dev/shm")) == shm


def test_a_sigterm_to_the_whole_group_drains_and_leaves_nothing(tiny: str) -> None:
    process = start(tiny, "--tp", "2", "--max-num-seqs", "4")
    (rank,) = rank_processes(process.popen.pid)

    async def run() -> list[str]:
        begun: list[int] = []
        asked = [asyncio.create_task(stream(process.url, 40, begun, f"{i} abc")) for i in range(3)]
        while len(begun) < 3:
            await asyncio.sleep(0.01)
        os.kill(rank, signal.SIGTERM)  # as a service manager does it: every process of the group gets the signal
        process.popen.send_signal(signal.SIGTERM)
        return await asyncio.gather(*asked)

    texts = asyncio.run(asyncio.wait_for(run(), 60))
    assert sum('"finish_reason":"length"' in text for text in texts) == 3
    assert process.popen.wait(20) == 0
    assert until(lambda: is_gone(rank), 2.0)


def test_kill_9_of_rank_0_ends_the_others(tiny: str) -> None:
    shm = set(os.listdir("/dev/shm"))
    process = start(tiny, "--tp", "2")
    (rank,) = rank_processes(process.popen.pid)
    process.popen.kill()
    assert process.popen.wait(10) == -signal.SIGKILL
    assert until(lambda: is_gone(rank), 5.0)
    assert set(os.listdir("/dev/shm")) == shm


def test_a_size_that_does_not_divide_is_refused_in_one_line(tiny: str) -> None:
    with pytest.raises(AssertionError, match="the server ended with 2"):
        start(tiny, "--tp", "3")
