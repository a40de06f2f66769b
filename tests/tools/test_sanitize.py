"""tools/sanitize.py with a stand-in for compute-sanitizer: logs, counts, time, verdicts, records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import sanitize
from tools.sanitize import FAULTS, PLANTED, ROOT, TOOLS, Found, read_counts, read_log, verdict
from tools.sanitize_families import BENCH_ALONE, EDITS, FAMILIES, SOURCES, edited, kernel_entries, not_launched

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
BAD = (
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n=========     at moe_w4+0x50\n"
    "=========     by thread (3,0,0) in block (0,0,0)\n========= ERROR SUMMARY: 12 errors\n"
)
RACE = (
    "========= COMPUTE-SANITIZER\n========= Error: Race reported between Write access at f+0x10\n"
    "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
)
# Says what the tests' tools say: racecheck finds two hazards in tree_mla unless all lanes arrive, memcheck 12 errors where planted.
STAND_IN = """#!{python}
import os, sys, time
tool, log, command = sys.argv[2], sys.argv[6], " ".join(sys.argv[7:])
planted, quiet = "--plant" in command, {quiet!r}
said = {{"race": {race!r}, "bad": {bad!r}, "clean": {clean!r}}}
if "test_residency" in command:
    time.sleep(30)
planted = planted and quiet not in (tool, "all")
hazards = planted or ("tree_mla" in command and not os.environ.get("EVERY_LANE_ARRIVES"))
text = said["race" if hazards else "clean"] if tool == "racecheck" else said["bad" if planted else "clean"]
if tool == "racecheck":
    text = text.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
if "linear_lt" not in command:
    open(log, "w").write(text)
print("1 failed, 2 passed in 1.0s" if "moe_w4" in command and tool == "synccheck" else "3 passed in 0.5s")
"""


@pytest.fixture
def ran(tmp_path, monkeypatch, capsys):
    """Runs the tool over families; (exit status, records, what was printed)."""

    def run(families: str, quiet: str = "", limit: float = 60.0, idle: str = ""):
        program, records = tmp_path / "compute-sanitizer", tmp_path / "found.jsonl"
        program.write_text(STAND_IN.format(python=sys.executable, quiet=quiet, race=RACE, bad=BAD, clean=CLEAN))
        program.chmod(0o755)
        monkeypatch.setattr(sanitize, "provenance", lambda commit: {"gpu": "none", "commit": commit})
        launched = sorted({kernel for family in FAMILIES.values() for kernel in family.kernels} - {idle})
        plain = [sys.executable, "-c", f"import os; print(*{launched}, file=open(os.environ['LAUNCHED'], 'w')); print('3 passed in 0.1s')"]
        command_of = sanitize.command_of
        monkeypatch.setattr(
            sanitize, "command_of", lambda family, tool: plain if tool in (sanitize.PLAIN, sanitize.LANES) else command_of(family, tool)
        )  # fmt: skip
        options = ["--families", families, "--sanitizer", str(program), "--json", str(records), "--limit", str(limit), "--commit", "abc"]
        status = sanitize.main(options)
        return status, [json.loads(line) for line in records.read_text().splitlines()], capsys.readouterr().out

    return run


def test_logs_are_read():
    assert read_log(CLEAN) == (0, 0, "") and read_log("========= COMPUTE-SANITIZER\n") is None
    errors, hazards, first = read_log(BAD)
    assert (errors, hazards) == (12, 0) and first.startswith("Invalid __global__ write of size 4 bytes | at moe_w4+0x50")
    assert read_log(RACE)[:2] == (0, 2)
    assert read_counts("x\n4 passed, 2 deselected in 3.0s") == (4, 0) and read_counts("1 failed, 2 passed, 1 error in 3s") == (2, 2)


def test_all_clean_is_success_and_recorded(ran):
    status, records, text = ran("tree_mla,model")
    assert status == 0 and len(records) == 2 + 2 + 4 * 3, text
    assert {r["commit"] for r in records} == {"abc"} and all(r["state"] == "done" and len(r["kernels"]) == 12 for r in records)
    assert re.search(r"tree_mla +3 passed +3 passed +0 errors +0 hazards +0 errors +0 errors", text)
    assert re.search(r"planted +12 errors +2 hazards +12 errors +12 errors", text)


def test_failures_time_and_missing_logs_are_no_success(ran):
    status, records, text = ran("moe_w4,linear_lt,residency", limit=6.0)
    state = {(r["tool"], r["family"]): r["state"] for r in records}
    assert status == 1 and state["synccheck", "moe_w4"] == state["memcheck", "linear_lt"] == "failed"
    assert state["memcheck", "moe_w4"] == "done" and state["memcheck", "residency"] == "timeout"
    assert "memcheck over residency: timeout" in text


def test_a_blind_tool_shows_and_is_left_out(ran):
    status, records, text = ran("model", quiet="initcheck")
    assert status == 1 and "initcheck is blind: 0 errors where a fault is planted" in text
    state = {(r["tool"], r["family"]): r["state"] for r in records}
    assert state["initcheck", "model"] == "not run" and state["memcheck", "model"] == "done"


def test_where_all_tools_are_blind_nothing_else_is_run(ran):
    status, records, text = ran("model,moe_w4", quiet="all")
    assert status == 1 and text.count("is blind") == 4
    assert {(r["family"], r["state"]) for r in records} == {(PLANTED, "done"), ("model", "not run"), ("moe_w4", "not run")}


def test_a_kernel_that_its_family_did_not_launch_shows(ran):
    status, records, text = ran("tree_mla,model", idle="tree_mla_plan")
    assert status == 1 and "plain over tree_mla: failed (not launched: tree_mla_plan)" in text
    assert {r["state"] for r in records if r["tool"] in TOOLS} == {"done"}, "the tools run all the same"


def test_launches_are_noted_once(tmp_path, monkeypatch):
    from runtime.kernels_cu import _launch
    from tools.sanitize_families import note_launches

    class Launch:
        def __init__(self, name):
            self.function, self.streams = type("F", (), {"name": name}), []

        def run(self, stream):
            self.streams.append(stream)

    notes = tmp_path / "launched"
    monkeypatch.setattr(_launch, "Launch", Launch)
    monkeypatch.setenv("LAUNCHED", str(notes))
    note_launches()
    made = [Launch("tree_mla"), Launch("tree_mla"), Launch("tree_mla_plan")]
    for launch in made:
        launch.run(7)
    assert notes.read_text().split() == ["tree_mla", "tree_mla_plan"] and [m.streams for m in made] == [[7]] * 3
    assert not_launched("tree_mla", notes) == [] and not_launched("trials", notes) == ["tree_mla_merge"]


def test_every_kernel_has_a_family():
    """A kernel that is added without one, or named without being there, shows."""
    here, named = set(kernel_entries()), {kernel for family in FAMILIES.values() for kernel in family.kernels}
    assert named | set(BENCH_ALONE) == here and not named & set(BENCH_ALONE)


def test_a_new_kernel_is_seen(tmp_path):
    (tmp_path / "prim").mkdir()
    for file in (*SOURCES.glob("*.cu"), *SOURCES.glob("prim/*.cuh")):
        (tmp_path / file.relative_to(SOURCES)).write_text(file.read_text())
    added = tmp_path / "prim" / "new.cuh"
    added.write_text('extern "C" __global__ void __launch_bounds__(kThreads, 2)\n    brand_new(const int* a) {}\n')
    assert kernel_entries(tmp_path).keys() - kernel_entries().keys() == {"brand_new"}
    added.write_text('extern "C" __global__ void __cluster_dims__(2) other(const int* a) {}\n')
    with pytest.raises(ValueError, match=r"new\.cuh: 1 kernels, of which 0 are read"):
        kernel_entries(tmp_path)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.file)
def test_sources_are_edited_for_their_tools_alone(edit):
    text = (SOURCES / edit.file).read_text()
    for tool in TOOLS:
        got = edited(edit.file, text, tool)
        assert (edit.instead in got) == (got != text) == (tool in edit.tools)
    assert got.count("named_barrier(3,") == (0 if "synccheck" in edit.tools else text.count("named_barrier(3,"))
    assert edited("other.cu", text, edit.tools[0]) == text
    with pytest.raises(ValueError, match="finds no"):
        edited(edit.file, "", edit.tools[0])


def test_the_edited_sources_are_built(monkeypatch):
    """In the process that is told of a tool, build() reads what the tool gets."""
    from runtime.kernels_cu import _build, linear_lt
    from tools.sanitize_families import note_launches

    monkeypatch.setattr(_build, "read_source", _build.read_source)
    monkeypatch.setattr(linear_lt, "SUGGESTIONS", linear_lt.SUGGESTIONS)
    monkeypatch.delenv("LAUNCHED", raising=False)
    shipped, digest = _build.read_source("tree_mla.cu"), _build.digest("tree_mla.cu")
    monkeypatch.setenv("SANITIZED", "synccheck")
    note_launches()
    assert _build.read_source("tree_mla.cu") == edited("tree_mla.cu", shipped, "synccheck") != shipped
    assert _build.digest("tree_mla.cu") != digest and linear_lt.SUGGESTIONS == 1


def test_a_finding_shows():
    found = [Found("racecheck", "tree_mla", "done", hazards=2, passed=3, first="Race"), Found("memcheck", PLANTED, "done", errors=1)]
    assert verdict(found) == ["racecheck over tree_mla: 2 hazards (Race)"]
    assert verdict([Found("memcheck", "model", "not run")]) == ["memcheck over model: not run ()"]


def test_unknown_names_and_a_missing_program(monkeypatch, capsys):
    assert sanitize.main(["--tools", "leakcheck"]) == 2 and "leakcheck; there are memcheck" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda given: None)
    assert sanitize.main([]) == 2 and "was not found" in capsys.readouterr().err


def test_each_tool_has_its_fault():
    assert re.findall(r"void (\w+)\(", FAULTS) == list(TOOLS)


COLLECT = """import pytest
from tools.sanitize_families import FAMILIES

class Count:
    def pytest_collection_finish(self, session):
        print("\\ncount", len(session.items))

for family in FAMILIES.values():
    chosen = ["-k", family.chosen] if family.chosen else []
    pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", family.file, *chosen], plugins=[Count()])
"""


def test_every_family_names_tests():
    """Each expression picks some GPU tests, and each file exists."""
    found = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    counts = dict(zip(FAMILIES, map(int, re.findall(r"^count (\d+)$", found.stdout, re.M)), strict=True))
    assert all(1 <= count <= 48 for count in counts.values()), counts
    assert all(Path(ROOT / family.file).is_file() for family in FAMILIES.values())
