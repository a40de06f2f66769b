"""Schemathesis over /openapi.json, as a process of its own: whatever it sends gets an answer that the document knows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.env import load_env
from server import openapi as module

PROGRAM = shutil.which("schemathesis") or shutil.which("schemathesis", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no schemathesis")
# A document can not say what an empty list of messages or a token id of 10^9 is refused for: the only check left out.
UNCHECKED = "positive_data_acceptance"
EXAMPLES = {1: 5, 2: 40, 3: 300}[load_env().test_level]


def run(url: str, where: Path, phases: str = "coverage,fuzzing", examples: int = EXAMPLES) -> tuple[int, str]:
    """(exit code, output) of one run; seeded, so that it does not find something else in CI than here."""
    command = [str(PROGRAM), "run", f"{url}/openapi.json", "--max-examples", str(examples), "--seed", "7", "--no-color"]
    command += ["--phases", phases, "--request-timeout", "5", "--exclude-checks", UNCHECKED, "--continue-on-failure"]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_answer_is_documented_and_none_is_500(start_server: Any, tmp_path: Path) -> None:
    server = start_server()
    code, said = run(server.url, tmp_path)
    assert code == 0, said[-4000:]
    count = re.search(r"(\d+) generated, (\d+) passed", said)
    assert count and count[1] == count[2] and int(count[1]) > 800, said[-1000:]
    assert "Tested: 17" in said
    assert server.client.get("/health")[0] == 200 and server.client.complete()[0] == 200
    print(f"\n{count[1]} cases")


def test_a_failure_is_found(start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutations: an answer that the document does not know, and an endpoint that raises."""
    monkeypatch.delitem(module._REFUSALS, "400")
    code, said = run(start_server().url, tmp_path, "coverage", 1)
    assert code == 1 and "Undocumented status code" in said
    server = start_server()
    monkeypatch.setattr(type(server.loaded.tokenizer), "encode", lambda *_: 1 / 0)
    code, said = run(server.url, tmp_path, "coverage", 1)
    assert code == 1 and "Server error" in said
