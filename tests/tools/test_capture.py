"""tools/capture.py: the plan without a GPU, and the audit of a worker on the CPU shim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime import loading
from runtime.config import SpeculativeConfig
from runtime.graph.driver import ListDriver
from runtime.hw import HARDWARE
from runtime.planning import plan_step
from tests.runtime.graph.worlds import tiny_model
from tests.shim_device import ShimDevice
from tools import capture


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "find_gpu", lambda: (False, "CuPy sees no GPU"))


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_plans_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = tmp_path / "plan.json"
    assert (
        capture.main(["demo", "--sizes", "1", "64", "--detail", "--ctx", "300", "--json", str(where), "--dot", str(tmp_path / "dots")]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("CuPy sees no GPU: nothing is captured. PLANNED by the null backend for one h200")
    assert "moe_w4" in text and "--dot: no graphs without a GPU" in text and not (tmp_path / "dots").exists()
    report = json.loads(where.read_text())
    assert report["planned"] and [(p["kind"], p["rows"]) for p in report["programs"]] == [("step", 1), ("step", 64), ("draft", 8)]
    source = loading.open_source("demo", SpeculativeConfig())
    want = plan_step(source.target, 1, 64, 300, HARDWARE["h200"], streams=8)
    assert report["programs"][1]["floor_us"] == pytest.approx(want.floor_us)


@pytest.mark.usefixtures("no_gpu")
def test_a_model_without_files_is_planned_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert capture.main(["kimi-k26", "--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 8}', "--sizes", "8"]) == 0
    assert "step 8 " in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        capture.main(["/nowhere"])
    assert "/nowhere/config.json does not exist" in capsys.readouterr().err


def test_an_audit_is_printed_and_written(shim, capsys, tmp_path, monkeypatch) -> None:
    model = tiny_model(tmp_path)
    monkeypatch.setattr(capture, "find_gpu", lambda: (True, "a shim"))
    made = loading.make_gpu_executor
    monkeypatch.setattr(loading, "make_gpu_executor", lambda *args: made(*args, driver=ListDriver(ShimDevice(shim))))
    small = ["--max-num-seqs", "2", "--max-num-batched-tokens", "12", "--max-model-len", "64", "--block-size", "16", "--num-pages", "9"]
    out = ["--json", str(tmp_path / "audit.json"), "--dot", str(tmp_path / "dots"), "--sizes", "4", "--detail", "--streams", "2"]
    assert capture.main([str(model), *small, "--cudagraph-capture-sizes", "4", *out]) == 0
    text = capsys.readouterr().out
    assert (
        "shim: 4 launches audited, 4 of them graphs" in text
        and "no memory was taken" in text
        and "plan_read" in text
        and "6 graphs written" in text
    )
    report = json.loads((tmp_path / "audit.json").read_text())
    found = {(p["kind"], p["rows"]): p for p in report["programs"]}
    assert set(found) == {("step", 4), ("context", 4), ("block", 1), ("block", 2)} and report["steady"]
    step = found["step", 4]
    assert step["launches"] == sum(op["launches"] for op in step["ops"]) == step["nodes"]["kernel"]
    names = {path.name for path in (tmp_path / "dots").iterdir()}
    assert names == {"step-12-out-12.dot", "step-4-out-4.dot", "context-12.dot", "context-4.dot", "block-2.dot", "block-1.dot"}
