"""Making records again: what has changed is found, what does not fit is named, a step that fails stops no other."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tools import measure
from tools.measure import STEPS, Step
from tools.sanitize_families import BENCH_ALONE, FAMILIES, kernel_entries

ROOT = Path(__file__).resolve().parents[2]
KERNEL_FILES = kernel_entries()


def step(name: str, code: str, seconds: float = 0.0) -> Step:
    return Step(name, "made", seconds, ("-c", code), ("runtime",))


WRITES = "import json, sys; open(sys.argv[2], 'a').write(json.dumps({'commit': sys.argv[4]}) + '\\n')"


def test_records_are_packed_and_the_rest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step("first", WRITES), step("broken", "raise SystemExit(3)"), step("long", WRITES, seconds=1e6), step("last", WRITES)]
    missed = measure.run(steps, tmp_path / "out", tmp_path / "all.tar", "abc", measure.time.monotonic() + 60)
    said = capsys.readouterr().out
    assert missed == 2 and "broken: exit 3" in said and "long: takes 1000000 s" in said and "not recorded: broken, long" in said
    with tarfile.open(tmp_path / "all.tar") as archive:
        made = archive.extractfile("./made.jsonl")
        assert made is not None and [json.loads(line) for line in made] == [{"commit": "abc"}] * 2


def test_a_step_that_takes_too_long_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.run([step("slow", "import time; time.sleep(60)")], tmp_path, None, "", measure.time.monotonic() + 0.3) == 1
    assert "slow: exit cut" in capsys.readouterr().out


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit with one record of it."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "a.cu").write_text("1")
    (tmp_path / "other").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    (tmp_path / "made.jsonl").write_text(json.dumps({"cmd": "python -c 1 --json x", "commit": commit}) + "\n")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    return tmp_path


def test_what_changed_since_a_record_is_found(repo: Path) -> None:
    assert measure.state_of(step("one", "1")).startswith("as recorded at ")
    (repo / "other").write_text("2")
    assert measure.state_of(step("one", "1")).startswith("as recorded at "), "not its source"
    (repo / "runtime" / "a.cu").write_text("2")
    assert measure.state_of(step("one", "1")).startswith("changed since ")
    assert measure.state_of(step("two", "2")) == "never recorded"
    (repo / "made.jsonl").write_text(json.dumps({"cmd": "python -c 1", "commit": "beef123"}) + "\n")
    assert measure.state_of(step("one", "1")) == "changed since beef123", "git does not know it"


def test_a_header_that_a_kernel_includes_counts_as_its_source(repo: Path) -> None:
    kernels, header = repo / "runtime" / "kernels_cu", "prim/chunk_items.cuh"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repo)]
    (kernels / "prim").mkdir(parents=True)
    for name in ("chunk_plan.cu", header, "prim/w4.cuh"):
        (kernels / name).write_text("1")
    for words in (["add", "."], ["commit", "-qm", "two"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    (repo / "made.jsonl").write_text(json.dumps({"cmd": "python -c 1", "commit": head}) + "\n")
    chunks = Step("one", "made", 0.0, ("-c", "1"), (f"{measure.KERNELS}/chunk_plan.cu",))
    assert f"{measure.KERNELS}/{header}" in chunks.paths
    (kernels / "prim" / "w4.cuh").write_text("2")
    assert measure.state_of(chunks).startswith("as recorded"), "it includes no w4.cuh"
    (kernels / header).write_text("2")
    assert measure.state_of(chunks).startswith("changed since")


def test_a_record_is_of_the_step_whose_command_it_names(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (Step(name, "made", 0.0, argv, ()) for name, argv in (("a", ("x.py",)), ("b", ("x.py", "demo", '{"n": 8}', "{out}/y"))))
    monkeypatch.setattr(measure, "STEPS", (short, long))
    rows = [{"cmd": 'python x.py demo {"n": 8} /tmp/y --json z', "commit": "bbb"}, {"cmd": "python x.py.old", "commit": "ccc"}]
    (repo / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (measure.last_commit(short), measure.last_commit(long)) == ("", "bbb")
    (repo / "made.jsonl").write_text(json.dumps({"cmd": "python x.py --most 3", "commit": "ddd"}) + "\n")
    assert (measure.last_commit(short), measure.last_commit(long)) == ("ddd", "")


def test_every_kernel_is_tested_and_measured_by_some_step() -> None:
    """A kernel that changed makes a step stale that runs tests of it, and one that times it."""
    tested = [made for made in STEPS if made.argv[0] == "tools/gpu_tests.py"]
    for name, family in FAMILIES.items():
        assert any(family.file.startswith(made.argv[1]) for made in tested), name
    for file in {KERNEL_FILES[kernel] for kernel in KERNEL_FILES if kernel not in BENCH_ALONE}:
        path = f"{measure.KERNELS}/{file if file.endswith('.cu') else f'prim/{file}'}"
        own = [made.name for made in STEPS if path in made.paths]
        assert own or not file.endswith(".cuh"), path
        assert any(measure.KERNELS in made.sources for made in tested if made.gpus == 1), path
    alone = {"tree_mla", "chunk_attention", "chunk_expand", "chunk_plan", "moe_w4", "moe_route", "linear_stream", "all_reduce"}
    for name in alone | {"sample_ranks", "gather_ranks"}:
        assert any(f"{measure.KERNELS}/{name}.cu" in made.paths for made in STEPS if made not in tested), name


class Parsed(Exception):
    """A program has taken all of its arguments."""


def test_every_step_s_arguments_are_parsed_by_its_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.chdir(ROOT)
    for made in STEPS:
        program = importlib.import_module(f"tools.{Path(made.argv[0]).stem}")
        argv = [part.replace("{out}", str(tmp_path)) for part in made.argv[1:]]
        with pytest.raises(Parsed):
            program.main([*argv, "--json", str(tmp_path / "made.jsonl"), "--commit", "abc"])
        with pytest.raises(SystemExit):  # what it would say to an option that it has not
            program.main([*argv, "--no-such-option"])


def test_every_step_is_a_program_that_takes_its_arguments() -> None:
    for made in STEPS:
        tree = ast.parse((ROOT / made.argv[0]).read_text(encoding="utf-8"))
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        own = [part for part in made.argv[1:] if part.startswith("--")]
        options = (ROOT / "server" / "options.py").read_text(encoding="utf-8") if "add_model_options" in ast.dump(tree) else ""
        assert all(part in words or f'"{part}"' in options for part in ("--json", "--commit", *own)), made.name
        assert all((ROOT / source).exists() for source in made.sources), made.name


def test_a_step_without_a_record_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step("quiet", "pass"), step("good", WRITES)]
    assert measure.run(steps, tmp_path, None, "", measure.time.monotonic() + 60) == 1
    said = capsys.readouterr().out
    assert "quiet: exit 0, and no record" in said and "good: exit 0 after" in said and "not recorded: quiet" in said


@pytest.mark.parametrize(("seen", "options"), [(0, ["--only", "step"]), (1, ["--gpus", "2"]), (1, ["--only", "host,step2"])])
def test_nothing_is_begun_without_its_gpus(
    seen: int, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "gpu_count", lambda: seen)
    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("begun"))
    assert measure.main([*options, "--out", str(tmp_path)]) == 2
    assert f"CuPy sees {seen} GPU(s), {seen + 1} are needed" in capsys.readouterr().err
    monkeypatch.setattr(measure, "gpu_count", lambda: 2)
    monkeypatch.setattr(measure, "run", lambda *_: 0)
    assert measure.main([*options, "--out", str(tmp_path)]) == 0


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.main(["--only", "kernels,step9"])
    assert "step9 is none of kernels, graphs" in capsys.readouterr().err


def test_the_list_needs_no_gpu() -> None:
    command = [sys.executable, str(ROOT / "tools" / "measure.py"), "--list"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert len(found.stdout.splitlines()) == len(STEPS)
