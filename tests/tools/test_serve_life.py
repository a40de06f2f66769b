"""The server as a process: SIGTERM under 32 streams, an engine that dies or hangs, --config, --trace, the log's lines."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from model.tiny import make_tiny
from runtime.stats import STAGES
from server.client import ApiClient
from tests.tools.test_serve import ADDRESS, ENVIRONMENT, ROOT, is_ready, start, until
from tests.waits import line_with


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("life") / "tiny"))


async def stream(url: str, tokens: int, begun: list[int], prompt: str = "abc") -> str:
    """The whole text of one event stream over a raw connection (HTTP/1.0: no chunks); `begun` grows at its first event."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    data = await reader.readuntil(b"data: ")
    begun.append(1)
    data += await reader.read()
    writer.close()
    return data.decode()


def test_sigterm_under_32_streams_ends_each_with_done(tiny: str) -> None:
    process = start(tiny, "--max-num-seqs", "32")

    async def run() -> list[str]:
        begun: list[int] = []
        asked = [asyncio.create_task(stream(process.url, 60, begun, f"{i} abc")) for i in range(32)]
        while len(begun) < 32:
            await asyncio.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(until, lambda: not is_ready(process), 2.0)
        return await asyncio.gather(*asked)

    texts = asyncio.run(asyncio.wait_for(run(), 60))
    assert sum(text.rstrip().endswith("data: [DONE]") for text in texts) == 32
    assert sum('"finish_reason":"length"' in text for text in texts) == 32, "and none was cut short"
    assert process.popen.wait(20) == 0


BROKEN = """
import sys, time
sys.path.insert(0, {root!r})
import runtime.cycle, tools.serve
run = runtime.cycle.Cycle.run
def broken(self, meanwhile):
    if self._stats.steps == 10:
        {fault}
    return run(self, meanwhile)
runtime.cycle.Cycle.run = broken
sys.exit(tools.serve.main({argv!r}))
"""


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", 500),
        ("time.sleep(60)", 503),
        ("time.sleep(0.01); return []", 503),  # steps finish, and nothing moves
    ],
)
def test_a_dead_or_hanging_engine_ends_the_process_within_5_s(tiny: str, fault: str, code: int) -> None:
    argv = [tiny, "--port", "0", "--watchdog-timeout", "1", "--spec-method", "none"]
    script = BROKEN.format(root=str(ROOT), fault=fault, argv=argv)
    popen = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd="/", env=ENVIRONMENT)
    url = line_with(popen, ADDRESS)[0][1]

    async def run() -> tuple[list[str], float]:
        begun: list[int] = []
        asked = [asyncio.create_task(stream(url, 100, begun)) for _ in range(4)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*asked), time.monotonic()

    texts, ended_s = asyncio.run(asyncio.wait_for(run(), 60))
    assert all(f'"code":{code}' in text and text.rstrip().endswith("data: [DONE]") for text in texts)
    assert "illegal" not in texts[0], "causes go to the log, not to clients"
    assert popen.wait(10) == 1
    seconds = time.monotonic() - ended_s
    print(f"\n{code}: the process ended {seconds:.2f} s after its clients heard of it")
    assert seconds < 5


def test_a_config_file_a_trace_and_the_lines_of_the_log(tiny: str, tmp_path: Path) -> None:
    config, trace = tmp_path / "serve.yaml", tmp_path / "trace.json"
    values: dict[str, Any] = {
        "model": tiny,
        "port": 0,
        "max-num-seqs": 4,
        "log-stats-interval": 0.2,
        "trace": str(trace),
        "api-key": ["k1"],
    }
    config.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--config", str(config)]
    with (tmp_path / "stderr").open("w") as stderr:
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd="/", env=ENVIRONMENT)
    url = line_with(popen, ADDRESS)[0][1]
    client = ApiClient(url, "k1")
    client.post("/v1/completions", {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "temperature": 0})
    info = client.get("/server_info")
    assert info["options"]["max_num_seqs"] == 4 and "k1" not in json.dumps(info)
    once = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "top.py"), url, "--api-key", "k1", "--once"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert re.search(r"tokens a step +\d", once.stdout) and "steps since start" in once.stdout
    time.sleep(0.3)
    popen.send_signal(signal.SIGTERM)
    assert popen.wait(20) == 0
    log = (tmp_path / "stderr").read_text(encoding="utf-8")
    assert "Avg generation throughput" in log and "SpecDecoding metrics: Mean acceptance length" in log
    assert re.search(r"Distinct experts: \d+\.\d of \d+ \(\d+%\)", log)
    events = json.loads(trace.read_text(encoding="utf-8"))
    assert {event["name"] for event in events if event["ph"] == "X"} == {"step", *STAGES}
    steps = [event["args"] for event in events if event["name"] == "step"]
    assert all(1 <= step["experts"] <= min(8, 2 * step["rows"]) for step in steps), "8 experts, 2 a row"


def test_a_config_file_that_names_no_option_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("max-num-seq: 3\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--config", str(tmp_path / "bad.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "did you mean max-num-seqs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
