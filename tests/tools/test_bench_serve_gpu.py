"""Streams against a server on the CPU by both clients, what must be found, and who else is on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.tiny import make_tiny
from tools import bench_serve_gpu as tool
from tools.gpu_memory import company, compute_processes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("serve") / "tiny"))


@pytest.mark.parametrize("client", ["openai", "own"])
def test_streams_of_both_clients(
    tiny: str, tmp_path: Path, client: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)  # there is no GPU to share here
    server = [tiny, "--num-pages", "300", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    options = ["--requests", "12", "--streams", "6", "--client", client, "--json", str(tmp_path / "r.jsonl"), "--", *server]
    code = tool.main(options)
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert code == 0 and record["faults"] == [], capsys.readouterr()
    assert record["client"].startswith("openai " if client == "openai" else "server.client")
    assert (record["errors"], record["most_open"], record["requests"]) == (0, 6, 12)
    assert record["tokens"] >= 12 and record["tokens_per_s"] > 0 and record["ttft_ms"]["p50"] <= record["ttft_ms"]["max"]
    assert record["commit"] and record["free_bytes"]["others"] is None


class Scripted:
    """Streams as given, or errors."""

    name = "scripted"

    def __init__(self, *pieces: object) -> None:
        self._pieces = pieces

    def chat(self, content: str, sampling: dict[str, object]):
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (("a",), "without usage"),
        (("a", ("", 1)), "finish reason ''"),
        (("a", ("stop", 999)), "999 tokens"),
        (("a", ConnectionResetError("gone")), "ConnectionResetError: gone"),
    ],
)
def test_wrong_answers_are_counted(pieces: tuple[object, ...], said: str) -> None:
    seen, _ = tool.send(Scripted(*pieces), 5, 2, 0)
    assert len(seen.wrong) == 5 and said in seen.wrong[0] and not seen.tokens
    good, wall_s = tool.send(Scripted("a", ("stop", 1)), 5, 2, 0)
    assert not good.wrong and good.tokens == 5 and wall_s > 0 and good.open == 0


def test_memory_that_differs_is_a_fault() -> None:
    assert tool.compare_memory(5, 5, None) == tool.compare_memory(None, 5, None) == []
    assert tool.compare_memory(9, 5, None) == ["free GPU memory: 9 bytes after the warm-up, 5 at the end"]
    assert tool.compare_memory(9, 5, "x runs")[0].endswith("but x runs")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "ended with -15"),
        ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)", "still runs"),
        ("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True); time.sleep(60)", None),
    ],
)
def test_how_a_server_ends(program: str, said: str | None) -> None:
    popen = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    if "print" in program:
        assert popen.stdout is not None and popen.stdout.readline()
    found = tool.stop(popen, 1.0 if said == "still runs" else 20.0)
    popen.kill()
    popen.wait()
    assert (said in found[0]) if said else not found


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an nvidia-smi that sees these processes; None: one that fails."""

    def make(pids: list[int] | None) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + ("exit 9\n" if pids is None else "".join(f"echo {pid}\n" for pid in pids)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    return make


def test_who_else_is_on_a_gpu(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(None)
    assert compute_processes() is None and company(lambda: 7, idle_s=0.01) is None
    smi([11])
    assert compute_processes() == [11] and company(lambda: 7, idle_s=0.01) is None
    smi([11, 12])
    assert company(lambda: 7, expected=2, idle_s=0.01) is None
    assert company(lambda: 7, idle_s=0.01) == "2 processes hold GPU memory (11, 12), 1 expected"
    smi([])
    readings = iter(range(9))
    assert company(lambda: next(readings), idle_s=0.01) == "free GPU memory changes while this process is idle: 0, then 1"
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    assert "4 test processes" in str(company(lambda: 7, idle_s=0.01))
