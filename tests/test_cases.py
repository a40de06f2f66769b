"""docs/cases.md is true: every test it names exists, every case has one, the count is right."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \| (.+?) \| (pass|not yet) \|$", re.M)
NAMED = re.compile(r"`([\w./]+)::(\w+)`")
CASES = 45


def read() -> str:
    return (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[:5] == "test_"
    )


def missing(text: str) -> list[str]:
    """Tests that are named and do not exist."""
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if not (ROOT / file).is_file() or name not in names_in(ROOT / file)]


def faults(text: str) -> list[str]:
    """What is wrong with the table."""
    rows, bad = ROW.findall(text), missing(text)
    ids = [row[0] for row in rows]
    bad += [f"{id} stands twice" for id in {id for id in ids if ids.count(id) > 1}]
    bad += [f"{id} passes without a test" for id, _, _, tests, state in rows if state == "pass" and not NAMED.search(tests)]
    bad += [
        f"{id} is not yet, and nothing says why"
        for id, *_, state in rows
        if state == "not yet" and not re.search(rf"^- .*\b{id}\b", text, re.M)
    ]
    passed = sum(row[4] == "pass" for row in rows)
    if f"**{passed} of {len(rows)} pass.**" not in text:
        bad.append(f"the head must say: **{passed} of {len(rows)} pass.**")
    if len(rows) != CASES or text.count("\n| ") - text.count("\n| case |") != CASES:
        bad.append(f"{len(rows)} rows can be read, there are {CASES} cases")
    return bad


def test_the_table_is_true() -> None:
    assert not faults(read()), "\n".join(faults(read()))


def test_faults_are_found() -> None:
    text = read()
    gone = text.replace("::test_twenty_kilobytes`", "::test_thirty_kilobytes`")
    assert faults(gone) == ["tests/model/test_tool_parser.py::test_thirty_kilobytes"]
    assert any("test_nowhere.py" in line for line in faults(text.replace("tests/model/test_shards.py", "tests/model/test_nowhere.py")))
    assert any("can be read" in line for line in faults(text.replace("| H4 |", "| X |")))
    assert any("stands twice" in line for line in faults(text.replace("| H4 |", "| H5 |")))
    assert any("the head must say" in line for line in faults(text.replace("of 45 pass", "of 46 pass")))
    assert any("nothing says why" in line for line in faults(text.replace("| pass |", "| not yet |", 1)))
