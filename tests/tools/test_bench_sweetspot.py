"""The sweep on a tiny model, and steps whose text is a recorded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import dflash
from model.tiny import make_tiny
from runtime import loading, measure
from runtime.config import SpeculativeConfig
from runtime.curve import CostCurve
from runtime.engine import Engine
from runtime.load_config import LoadConfig
from runtime.speculate import NoSpeculation, TreeSpeculation
from runtime.types import DraftLogits, Request
from tests.language import make_request, scattered
from tests.scripted import ScriptedExecutor, make_engine, run_all
from tools import bench_sweetspot
from tools.cut_drafter import cut_drafter
from tools.plot import read_sweetspot
from tools.replay import States, grow_states
from tools.replayed import ReplayedText

FIELDS = {"curve", "streams", "policy", "tok_s", "nodes_per_stream", "accepted_per_step", "M"}


def some_states(count: int = 300, depth: int = 7, choices: int = 4) -> States:
    """One text of random tokens; the drafter's first choice is right two times in three."""
    rng = np.random.default_rng(1)
    text = rng.integers(4, 90, count + depth)
    truth = np.stack([text[i : i + depth] for i in range(count)])
    ids = rng.permuted(np.tile(np.arange(90, 97), (count, depth, 1)), axis=2)[:, :, :choices].astype(np.int32)
    right = rng.random((count, depth)) < 2 / 3
    ids[:, :, 0] = np.where(right, truth, ids[:, :, 0])
    logp = np.tile(np.log([0.6, 0.2, 0.1, 0.05]), (count, depth, 1)).astype(np.float32)
    return States(DraftLogits(ids, logp), truth, np.full(count, count))


def test_the_text_and_what_is_accepted_are_the_record() -> None:
    states = some_states()
    inner = ScriptedExecutor(guess=scattered(3), num_pages=200, max_rows=64)
    run = ReplayedText(inner, states)
    grown = grow_states(states, 5)
    made = make_engine(run, speculator=TreeSpeculation(run, SpeculativeConfig(method="ddtree", tree_budget=5)), enable_prefix_caching=False)
    requests = [make_request(f"r{i}", [1, 2, 3 + i], seed=i, max_tokens=40, ignore_eos=True) for i in range(3)]
    got = run_all(made, requests)
    for request in requests:
        emissions = got[request.id]
        first = int(run.state(request.seed, 2))
        written = [token for emission in emissions for token in emission.tokens]
        assert written == states.truth[(first + np.arange(40)) % len(states), 0].tolist()
        at = (first + 1) % len(states)
        for emission in emissions[1:-3]:
            assert emission.accepted == int(grown.accepted(np.array([at]), 5)[0]) and emission.drafted == 5
            at = (at + emission.accepted + 1) % len(states)
    assert sum(e.accepted or 0 for e in got["r0"]) > 10, "some of it is right"
    assert inner.drafts and inner.steps, "every step and draft was run"
    plain = make_engine(ReplayedText(ScriptedExecutor(num_pages=200, max_rows=64), states), speculator=NoSpeculation())
    assert [t for e in run_all(plain, requests)["r1"] for t in e.tokens] == [t for e in got["r1"] for t in e.tokens]


def test_foreign_tokens_are_refused() -> None:
    states = some_states()
    states.truth[5, 5] = 97
    with pytest.raises(ValueError, match="token 97 is outside the model's vocabulary of 97"):
        ReplayedText(ScriptedExecutor(guess=scattered(3)), states)


def test_the_command_measures_every_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "BUDGET_S", 0.2)
    monkeypatch.setattr(bench_sweetspot, "MOST_PROMPT", 10_000)
    model, out, prompts = make_tiny(tmp_path / "tiny"), tmp_path / "s.jsonl", tmp_path / "p.txt"
    prompts.write_text("abc\nde\n")
    out.write_text(json.dumps({"curve": "other"}) + "\n")
    firsts, submit = dict[int, int](), bench_sweetspot.Engine.submit

    def noting(engine: Engine, request: Request, *rest: Any) -> None:
        firsts.setdefault(engine, request.seed)
        submit(engine, request, *rest)

    monkeypatch.setattr(bench_sweetspot.Engine, "submit", noting)
    common = [str(model), "--curve", "tiny", "--curves", str(tmp_path), "--out", str(out), "--prompts", str(prompts), "--repeats", "2"]
    argv = [*common, "--streams", "1", "3", "--seconds", "0.05", "--policies", "plain", "chain", "tree:2", "tree:5", "auto"]
    assert bench_sweetspot.main(argv) == 0
    assert list(firsts.values())[-20:] == 2 * (5 * [0] + 5 * [41]), "in a turn all policies meet the same prompts"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0] == {"curve": "other"} and len(lines) == 1 + 2 * 6, "five policies and the best tree, at two numbers of streams"
    for line in lines[1:]:
        assert set(line) >= FIELDS | {"commit", "date", "cmd"} and line["simulated"] is False and line["tok_s"] > 0 and line["steps"] > 0
        assert line["M"] >= line["streams"] * 0.99
    by = {(line["streams"], line["policy"], line.get("budget")): line for line in lines[1:]}
    assert by[3, "plain", None]["nodes_per_stream"] == 0 == by[3, "plain", None]["drafted"]
    assert 1.0 < by[3, "tree", 2]["nodes_per_stream"] <= 2.0 < by[3, "tree", 5]["nodes_per_stream"] <= 5.0
    assert CostCurve.load(tmp_path / "tiny.json").key.model.startswith("tiny")
    assert set(read_sweetspot(out, "tiny")[3]) == {"plain", "chain", "tree", "uniform", "auto"}
    assert "auto ÷ best" in capsys.readouterr().out
    assert bench_sweetspot.main([*common, "--policies", "tree"]) == 2
    assert "policy 'tree' is none of plain, chain, tree:N, auto" in capsys.readouterr().err


def test_weights_that_say_nothing_run_a_recorded_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, no tokenizer: acceptance is the record's, tree by tree, and the steps are the model's."""
    monkeypatch.setattr(measure, "BUDGET_S", 0.2)
    model, out, traces = make_tiny(tmp_path / "tiny"), tmp_path / "s.jsonl", tmp_path / "t.npz"
    for file in model.iterdir():
        if file.suffix != ".json" and file.is_file():
            file.unlink()
    states = some_states()
    text = np.concatenate([[5], states.truth[:, 0], states.truth[-1, 1:]])
    named = {"ids": states.logits.ids[None], "logp": states.logits.logp[None], "tokens": text[None]}
    np.savez(
        traces, **{f"t.{key}": value for key, value in named.items()}, **{"t.prompt_length": np.array([0]), "t.end": np.array([len(text)])}
    )
    common = [str(model), "--load-format", "dummy", "--replay", str(traces), "--curve", "r", "--curves", str(tmp_path), "--out", str(out)]
    argv = [
        *common,
        "--streams",
        "2",
        "--seconds",
        "0.6",
        "--repeats",
        "1",
        "--policies",
        "plain",
        "tree:5",
        "--max-num-batched-tokens",
        "64",
    ]
    assert bench_sweetspot.main(argv) == 0
    by = {line["policy"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert by["tree"]["replayed"] is True and by["tree"]["nodes_per_stream"] == pytest.approx(5.0, abs=0.5)
    assert by["tree"]["accepted_per_step"] > 0.5, "1.6 in the record, of 512 random tokens none"


def test_a_drafter_is_cut_with_its_target(tmp_path: Path) -> None:
    whole = Path(dflash.__file__).parent / "configs" / "kimi-k26-dflash.json"
    for layers, own, taps in ((6, 1, (0, 1, 2, 3, 4, 5)), (20, 2, (0, 4, 8, 11, 15, 19)), (61, 6, (0, 12, 24, 36, 48, 60))):
        made = cut_drafter(whole, layers, tmp_path)
        weights = LoadConfig("dummy", {"num_hidden_layers": layers})
        source = loading.open_source("kimi-k26", SpeculativeConfig(method="ddtree", model=str(made)), weights)
        assert source.drafter is not None and (source.drafter.layers, source.drafter.taps, source.drafter.depth) == (own, taps, 7)
