"""The server over two stages: started by it, or by hand on another node; one dies in the middle of a step, or all goes well."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from model.tiny import make_tiny
from tests.tools.test_serve import ENVIRONMENT, ROOT, start, until
from tests.tools.test_serve_life import stream
from tests.tools.test_serve_ranks import is_gone, rank_processes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("stages") / "tiny"))


async def ask(url: str, tokens: int, strike: object) -> list[str]:
    """What three streams of the server received; strike() once all have begun."""
    begun: list[int] = []
    asked = [asyncio.create_task(stream(url, tokens, begun, f"{i} abc")) for i in range(3)]
    while len(begun) < 3:
        await asyncio.sleep(0.01)
    strike()  # type: ignore[operator]
    return await asyncio.gather(*asked)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_stage_that_dies_or_hangs_ends_all_within_10_s(tiny: str, number: signal.Signals) -> None:
    shm = set(os.listdir("/dev/shm"))
    process = start(tiny, "-pp", "2", "--watchdog-timeout", "2")
    assert "TP 1, 2 stages" in process.lines[0]
    (stage,) = rank_processes(process.popen.pid)
    struck: list[float] = []

    def strike() -> None:
        os.kill(stage, number)
        struck.append(time.monotonic())

    texts = asyncio.run(asyncio.wait_for(ask(process.url, 5000, strike), 60))
    assert all('"error":' in text and text.rstrip().endswith("data: [DONE]") for text in texts)
    assert not any("stage" in text or "signal" in text for text in texts), "causes go to the log, not to clients"
    assert process.popen.wait(15) == 1
    assert time.monotonic() - struck[0] < 10
    assert until(lambda: is_gone(stage), 2.0)
    assert set(os.listdir("/dev/shm")) == shm


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def node(model: str, port: int, *options: str, token: str = "secret") -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), model, "-pp", "2", "--master-addr", f"127.0.0.1:{port}", *options]
    environment = {**ENVIRONMENT, "RUNTIME_STAGE_TOKEN": token}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/", env=environment)


@pytest.mark.slow
def test_a_stranger_and_a_node_that_was_told_other_things_are_refused(tiny: str) -> None:
    port = free_port()
    first = node(tiny, port, "--port", "0")
    strange = node(tiny, port, "--node-rank", "1", token="guess")
    assert strange.wait(60) == 2 and "token" in strange.communicate(timeout=10)[1]
    other = node(tiny, port, "--node-rank", "1", "--max-num-seqs", "3")
    for process in (other, first):
        assert process.wait(60) == 2 and "max_num_seqs is 64 here and 3 at stage 1" in process.communicate(timeout=10)[1]


def test_nodes_started_by_hand_serve_one_model_and_drain_together(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setitem(ENVIRONMENT, "RUNTIME_STAGE_TOKEN", "secret")
    second = node(tiny, port, "--node-rank", "1")
    served = start(tiny, "-pp", "2", "--master-addr", f"127.0.0.1:{port}")

    def strike() -> None:
        for pid in (second.pid, served.popen.pid):
            os.kill(pid, signal.SIGTERM)  # as a service manager does it

    texts = asyncio.run(asyncio.wait_for(ask(served.url, 30, strike), 60))
    assert sum('"finish_reason":"length"' in text for text in texts) == 3
    assert served.popen.wait(20) == 0 and second.wait(10) == 0
    assert "this node ends when node 0 does" in second.communicate(timeout=10)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--node-rank", "2", "--master-addr", "127.0.0.1:9"), "node_rank: 2 of 2 nodes; legal: 0 to 1"),
        (("--node-rank", "1", "--master-addr", "127.0.0.1"), "master_addr: '127.0.0.1' is not HOST:PORT"),
        (("--node-rank", "1"), "node_rank: 1, but no master_addr"),
        (("--master-addr", "192.0.2.77:9"), "master_addr: 192.0.2.77:9 is no address where this host can listen"),
        (("--nnodes", "3", "--master-addr", "127.0.0.1:9"), "nnodes: 3 node(s) for pipeline_parallel_size 2"),
    ],
)
def test_nodes_that_can_not_be_are_refused(
    tiny: str, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import serve

    monkeypatch.setenv("RUNTIME_STAGE_TOKEN", "secret")
    assert serve.main([tiny, "-pp", "2", "--port", "0", *options]) == 2
    assert words in capsys.readouterr().err


def test_nodes_need_a_secret(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tools import serve

    monkeypatch.delenv("RUNTIME_STAGE_TOKEN", raising=False)
    assert serve.main([tiny, "-pp", "2", "--node-rank", "1", "--master-addr", "127.0.0.1:9"]) == 2
    assert "RUNTIME_STAGE_TOKEN is not set" in capsys.readouterr().err
