"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = {".py": 380, ".cu": 900, ".cuh": 350}  # "about 300"; one model in one file takes the most
FUNCTION_LINES = 66  # "about 60"
TEST_FILE_LINES = 400
DESIGN_LINES = 300
TREE_BYTES = 56 << 20
SKIPPED = {".git", "__pycache__", "build", "dist"}
SKIPPED_STARTS = (".venv", ".mypy", ".ruff", ".pytest", ".hypothesis")


def files(root: Path) -> list[Path]:
    def kept(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return not any(p in SKIPPED or p.startswith(SKIPPED_STARTS) or p.endswith(".egg-info") for p in parts)

    return sorted(path for path in root.rglob("*") if path.is_file() and kept(path))


def long_files(paths: list[Path], root: Path) -> list[str]:
    bad = []
    for path in paths:
        limit = FILE_LINES.get(path.suffix)
        if limit is None:
            continue
        if path.relative_to(root).parts[0] == "tests":
            limit = max(limit, TEST_FILE_LINES)
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > limit:
            bad.append(f"{path.relative_to(root)}: {lines} lines, at most {limit}")
    return bad


def long_functions(source: str, where: str) -> list[str]:
    """Functions over the limit, measured from def to the last line, docstring not counted."""
    bad = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            if lines > FUNCTION_LINES:
                bad.append(f"{where}: {node.name} has {lines} lines, at most {FUNCTION_LINES}")
    return bad


def test_files_stay_within_their_lines() -> None:
    bad = long_files(files(ROOT), ROOT)
    assert not bad, "\n".join(bad)


def test_functions_stay_within_their_lines() -> None:
    bad: list[str] = []
    for path in files(ROOT):
        if path.suffix == ".py":
            bad += long_functions(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert not bad, "\n".join(bad)


def test_design_page_stays_within_its_lines() -> None:
    assert (ROOT / "DESIGN.md").read_text(encoding="utf-8").count("\n") <= DESIGN_LINES


def test_tree_stays_within_its_bytes() -> None:
    total = sum(path.stat().st_size for path in files(ROOT))
    assert total <= TREE_BYTES, f"the tree holds {total / 2**20:.1f} MiB, at most {TREE_BYTES >> 20}"


def test_limits_can_fail(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "a.py").write_text("x = 1\n" * (FILE_LINES[".py"] + 1))
    (tmp_path / "runtime" / "b.py").write_text("x = 1\n" * FILE_LINES[".py"])
    assert [line.split(":")[0] for line in long_files(files(tmp_path), tmp_path)] == ["runtime/a.py"]
    body = "    x = 1\n" * FUNCTION_LINES
    assert not long_functions("def f():\n    x = 0\n" + "    x = 1\n" * (FUNCTION_LINES - 2), "a")
    assert len(long_functions("def f():\n    '''Said.'''\n" + body, "a")) == 1
    assert len(long_functions("class A:\n  async def f(self):\n" + body, "a")) == 1
