"""Options to what runtime.load takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from model.tiny import make_tiny
from runtime.types import InvalidRequest, SamplingParams
from server.options import OptionError, add_model_options, has_drafter, layers_of, load_from, model_of, speculative_of


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return parser.parse_args(list(options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model with a drafter, and one without."""
    root = tmp_path_factory.mktemp("options")
    return str(make_tiny(root / "with")), str(make_tiny(root / "without", drafter=False))


def test_speculation_follows_the_folder_unless_told(folders: tuple[str, str]) -> None:
    drafter, none = folders
    assert has_drafter(drafter)
    assert speculative_of(parse(drafter)) == {"method": "ddtree"}
    assert speculative_of(parse(none)) is None
    assert speculative_of(parse(drafter, "--spec-method", "none")) is None
    assert speculative_of(parse(none, "--tree-budget", "8")) == {"method": "ddtree", "tree_budget": 8}, (
        "asked for: the loader says what is missing"
    )


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (["--spec-method", "dflash", "--spec-tokens", "5"], {"method": "dflash", "num_speculative_tokens": 5}),
        (["--speculative-algorithm", "DDTREE", "--tree-budget", "32"], {"method": "ddtree", "tree_budget": 32}),
        (["--tree-budget", "auto"], {"method": "ddtree", "tree_budget": "auto"}),
        (["--spec-method", "ddtree", "--spec-model", "/d"], {"method": "ddtree", "model": "/d"}),
        (["--speculative-config", '{"method": "none"}'], '{"method": "none"}'),
    ],
)
def test_short_flags_and_json(options: list[str], config: Any) -> None:
    assert speculative_of(parse("demo", *options)) == config


@pytest.mark.parametrize(
    "options",
    [
        ["--speculative-config", "{}", "--spec-method", "ddtree"],
        ["--speculative-config", "{}", "--spec-tokens", "3"],
        ["--spec-method", "none", "--tree-budget", "3"],
    ],
)
def test_contradictions_are_refused(options: list[str]) -> None:
    with pytest.raises(OptionError, match=options[2]):
        speculative_of(parse("demo", *options))


def test_the_model_by_position_or_by_flag() -> None:
    assert model_of(parse()) == "demo"
    assert (
        model_of(parse("a"))
        == model_of(parse("--model", "a"))
        == model_of(parse("--model-path", "a"))
        == model_of(parse("a", "--model", "a"))
        == "a"
    )
    with pytest.raises(OptionError, match="'a' by position"):
        model_of(parse("a", "--model", "b"))


def test_layers_are_what_the_config_says(folders: tuple[str, str]) -> None:
    assert layers_of(folders[0]) == 2
    with pytest.raises(FileNotFoundError):
        layers_of("/nowhere")


def test_options_reach_the_loaded_model(folders: tuple[str, str], tmp_path: Path) -> None:
    steps: list[str] = []
    options = [
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "2",
        "--served-model-name",
        "x",
        "--num-pages",
        "20",
        "--disable-radix-cache",
        "--tp",
        "2",
    ]
    loaded = load_from(parse(folders[0], *options), steps.append, speculative_config=None)
    assert (loaded.name, loaded.max_model_len, loaded.draft_depth) == ("x", 128, 0)
    assert loaded.engine.stats().pages_total == 19
    assert "TP 2" in loaded.summary
    assert len(steps) >= 2
    loaded.engine.shutdown(0)


def test_policy_and_target_reach_the_engine(folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path))
    options = ["--scheduling-policy", "priority", "--tpot-target-ms", "25", "--max-num-seqs", "4"]
    loaded = load_from(parse(folders[1], *options))
    assert loaded.engine._cycle._pace.target_s == 0.025
    loaded.engine.check(loaded.make_requests("a", [1], SamplingParams(priority=-1))[0])
    with pytest.raises(InvalidRequest, match="priority"):
        load_from(parse(folders[1])).make_requests("a", [1], SamplingParams(priority=-1))
    with pytest.raises(SystemExit):
        parse("--scheduling-policy", "random")
