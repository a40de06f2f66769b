"""Public load and fuzz tools against the server, where they are installed (in an environment of their own, their scripts in PATH)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from model.tiny import make_tiny
from tests.tools.test_serve import start

AIPERF, SCHEMATHESIS = shutil.which("aiperf"), shutil.which("schemathesis")
pytestmark = pytest.mark.slow


def byte_tokenizer(folder: Path) -> Path:
    """A Hugging Face tokenizer of single bytes: AIPerf wants one, and this needs no download."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    folder.mkdir()
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return folder


@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed")
def test_aiperf_reads_times_usage_and_speculation(tmp_path: Path) -> None:
    prompts = [json.dumps({"text": f"Write a Python function number {i} that adds two numbers."}) for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    process = start("--per-request-spec-decode-metrics", "detailed")
    command = [str(AIPERF), "profile", "--model", "demo", "--url", process.url, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
    command += ["--concurrency", "2", "--request-count", "6", "--extra-inputs", "max_tokens:32", "--use-server-token-count"]
    command += ["--input-file", str(tmp_path / "prompts.jsonl"), "--custom-dataset-type", "single_turn"]
    command += ["--tokenizer", str(byte_tokenizer(tmp_path / "tokenizer")), "--output-artifact-dir", str(tmp_path / "out")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    finally:
        assert process.stop() == 0
    assert done.returncode == 0, done.stdout[-3000:]
    made = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert made["request_count"]["avg"] == 6 and not made.get("error_request_count")
    assert made["time_to_first_token"]["avg"] > 0 and made["output_sequence_length"]["avg"] == 32
    assert "Spec Decode" in done.stdout and re.search(r"Accepted drafts per step .* 0: +\d+%", done.stdout), (
        "its records passed AIPerf's checks"
    )


@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    process = start(str(model), "--spec-method", "none", "--max-model-len", "256", "--max-num-seqs", "8")
    command = [str(SCHEMATHESIS), "run", f"{process.url}/openapi.json", "--checks", "not_a_server_error", "--max-examples", "20"]
    try:
        done = subprocess.run(
            [*command, "--request-timeout", "10", "--generation-deterministic"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
        )
        assert process.http.get("/health") == {"status": "ok"}
    finally:
        assert process.stop() == 0
    assert done.returncode == 0, done.stdout[-3000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found and found[1] == found[2] and int(found[1]) > 300
