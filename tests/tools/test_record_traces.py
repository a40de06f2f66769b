"""Recording on this runtime gives the traces that another implementation recorded of the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools import record_traces
from tools.replay import load_states
from tools.simulate import main as simulate

TRACES = Path(__file__).parents[1] / "fixtures" / "draft_traces.npz"
TOKENS = 24


def test_a_recorded_text_is_the_fixtures(tmp_path: Path) -> None:
    with np.load(TRACES) as held:
        prompts = [held["chat.tokens"][p, : held["chat.prompt_length"][p]].tolist() for p in range(2)]
        want = {name: held[f"chat.{name}"][:2] for name in ("ids", "logp", "tokens")}
    got = record_traces.Recorder.open("demo").record(prompts, TOKENS)
    near = 0.0
    for p, prompt in enumerate(prompts):
        end = int(got["end"][p])
        assert end == len(prompt) + TOKENS + 2 and got["prompt_length"][p] == len(prompt)
        assert got["tokens"][p, :end].tolist() == want["tokens"][p, :end].tolist()
        ours, theirs = got["logp"][p, :TOKENS].astype(np.float32), want["logp"][p, :TOKENS].astype(np.float32)
        near = max(near, float(np.abs(ours - theirs).max()))
        assert (got["ids"][p, :TOKENS, :, 0] == want["ids"][p, :TOKENS, :, 0]).mean() > 0.98
    assert near < 0.5, "log-probabilities to -20, recorded there with bfloat16 activations"
    np.savez(tmp_path / "t.npz", **{f"chat.{name}": value for name, value in got.items()})
    assert len(load_states(tmp_path / "t.npz")) == 2 * TOKENS


def test_the_command_records_what_the_simulator_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("def add(a, b):\n\nThe runtime reads\n")
    argv = ["--prompts", str(tmp_path / "p.txt"), "--kind", "text", "--tokens", "12", "--out", str(tmp_path / "t.npz")]
    assert record_traces.main(argv) == 0
    assert simulate(["--traces", str(tmp_path / "t.npz"), "--curves", "flat", "--streams", "2", "--out", str(tmp_path / "r.jsonl")]) == 0
    assert "wrote 2 texts" in capsys.readouterr().out


def test_prompts_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(["a", {"q": "b"}, {"text": "c"}]))
    with pytest.raises(ValueError, match="entry 2"):
        record_traces.read_prompts(path)
    assert record_traces.main(["--prompts", str(path), "--out", str(tmp_path / "t.npz")]) == 2
    assert "entry 2" in capsys.readouterr().err
