"""The command line of make_tiny: what it writes, what it says, what it refuses."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from model.weights import Checkpoint
from tools.make_tiny import EXAMPLES, main

ROOT = Path(__file__).parents[2]


def test_writes_what_the_options_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    assert (
        main([str(folder), "--seed", "4", "--set", "n_routed_experts=4", "--set", "rope_scaling=null", "--set", "draft_block_size=4"]) == 0
    )
    ckpt, draft = Checkpoint.open(folder), Checkpoint.open(folder / "drafter")
    assert ckpt.text_config["n_routed_experts"] == 4 and ckpt.text_config["rope_scaling"] is None and draft.config["block_size"] == 4
    said = capsys.readouterr().out
    assert f"{folder}: {len(ckpt.names())} tensors, {ckpt.total_bytes / 1e6:.1f} MB" in said and "drafter: 25 tensors" in said
    for path in [*folder.iterdir(), *(folder / "drafter").iterdir()]:
        assert path.is_dir() or re.search(rf"{re.escape(path.name)} +{path.stat().st_size:,} B", said)
    assert said.endswith(f"python tools/serve.py {folder}\n")


def test_flat_without_drafter(tmp_path: Path) -> None:
    assert main([str(tmp_path / "t"), "--flat-config", "--no-drafter", "--rope-parameters"]) == 0
    ckpt = Checkpoint.open(tmp_path / "t")
    assert ckpt.text_config is ckpt.config and "rope_parameters" in ckpt.config and not (tmp_path / "t" / "drafter").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--set", "num_hidden_layers"], "'num_hidden_layers' is not KEY=JSON, such as num_hidden_layers=4"),
        (["--set", "num_hidden_layers=four"], "'num_hidden_layers=four' is not KEY=JSON"),
        (["--set", "=4"], "'=4' is not KEY=JSON"),
        (["--set", "layers=4"], "layers is no key of the target's config"),
        (["--set", "seed=4"], "multiple values for"),
        (["--set", "vocab_size=5"], "vocab_size 5 is too small"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "t"), *options])
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_a_second_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "already holds a model; choose an empty folder" in capsys.readouterr().err


def test_every_example_of_the_help_runs(tmp_path: Path) -> None:
    commands = [c for c in EXAMPLES.replace("\\\n", " ").splitlines() if "python -m" in c]
    assert len(commands) == 5
    for i, command in enumerate(commands):
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "tools.make_tiny"]
        assert main([str(tmp_path / str(i)), *words[4:]]) == 0
        assert Checkpoint.open(tmp_path / str(i)).quantised


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.make_tiny", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "--set takes any key" in done.stdout and "python -m tools.make_tiny /tmp/tiny" in done.stdout
