"""AIPerf against the server: a public load tool, in an environment of its own, reads our streams, usage, speculation and metrics.

It weighs a gigabyte, so it is used where it is on the PATH, and at RUNTIME_TEST_LEVEL=3 installed for the run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.tiny import make_tiny
from runtime.env import load_env
from tests.tools.test_serve import start

REQUESTS, TOKENS = 10, 24


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("aiperf")
    if found is not None:
        return found
    if load_env().test_level < 3:
        pytest.skip("no aiperf on the PATH: pip install aiperf in an environment of its own")
    where = tmp_path_factory.mktemp("aiperf")
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True, timeout=120)
    command = [str(where / "bin" / "pip"), "install", "-q", "aiperf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"aiperf can not be installed: {done.stderr[-200:]}")
    return str(where / "bin" / "aiperf")


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes in Hugging Face's form: AIPerf makes its prompts with one, and fetches none."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    vocab = {chr(byte) if byte in kept else chr(next(other)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    model = {"type": "BPE", "vocab": {**vocab, "<eos>": 256}, "merges": []}
    whole = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 100_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_its_figures_are_the_servers(aiperf: str, kind: str, tmp_path: Path) -> None:
    process = start(str(make_tiny(tmp_path / "tiny")), "--served-model-name", "tiny", "--per-request-spec-decode-metrics", "detailed")
    command = [aiperf, "profile", "--model", "tiny", "--url", process.url, "--endpoint-type", kind, "--streaming", "--concurrency", "3"]
    command += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", str(TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--tokenizer", str(byte_tokenizer(tmp_path / "bytes"))]
    command += ["--ui", "none", "--artifact-dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    found: dict[str, Any] = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert found["completed_request_count"]["avg"] == REQUESTS and found["request_error_rate"]["avg"] == 0, said[-3000:]
    assert found["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS == process.metric("vllm:generation_tokens_total")
    assert found["time_to_first_token"]["avg"] > 0 and "Spec Decode" in said
    assert found["total_accepted_draft_tokens"]["avg"] == process.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert found["total_draft_tokens"]["avg"] == process.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert sum(found["pooled_spec_decode_acceptance_histogram"].values()) == process.metric("vllm:spec_decode_num_drafts_total")
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text(encoding="utf-8"))["metrics"]
    assert {"vllm:request_queue_time_seconds", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= set(scraped)
    assert process.stop() == 0
