"""Two replicas through Ray Serve give the text of one engine, streamed and whole; skipped where ray[serve] is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.tiny import make_tiny
from runtime import LLM, SamplingParams
from server.client import ApiClient
from tests.waits import line_with

ROOT = Path(__file__).resolve().parents[2]
HAVE_SERVE = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("fastapi") is not None
pytestmark = pytest.mark.skipif(not HAVE_SERVE, reason="Ray Serve is not installed (pip install 'ray[serve]')")


def test_two_replicas_give_the_text_of_one(tmp_path: Path) -> None:
    tiny = str(make_tiny(tmp_path / "tiny"))
    prompts = [f"{i} abc" for i in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    want = [output.outputs[0].text for output in LLM(tiny, max_model_len=128).generate(prompts, greedy)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        str(ROOT / "tools" / "serve_ray.py"),
        tiny,
        "--replicas",
        "2",
        "--cpus-per-replica",
        "0.5",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd="/")
    try:
        line_with(popen, r"2 replica\(s\) at")
        client = ApiClient(f"http://127.0.0.1:{port}")
        assert client.get("/health") == {"status": "ok"}
        body = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda p: client.post("/v1/completions", {**body, "prompt": p}), prompts * 3))
        assert [answer["choices"][0]["text"] for answer in answers] == want * 3
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps({**body, "prompt": prompts[0], "stream": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            events = [line.removeprefix(b"data: ") for line in stream if line.startswith(b"data: ")]
        assert events[-1].strip() == b"[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == want[0]
        steps = Counter(client.get("/dashboard.json")["steps"] for _ in range(40))
        assert len(steps) == 2, f"both replicas work; steps and how often they were told: {steps}"
    finally:
        popen.terminate()
        popen.wait(60)
