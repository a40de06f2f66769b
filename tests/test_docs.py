"""What the documents say is so: links, commands, files, the environment table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime.env import ENV_TABLE
from runtime.ops import OPS
from runtime.shapes import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md")
SERVE = "python -m venv .venv && .venv/bin/pip install -e '.[serve]' && .venv/bin/python tools/serve.py"
TEST = "python -m venv .venv && .venv/bin/pip install -e '.[serve,dev]' && .venv/bin/python -m pytest -q -n auto --dist loadfile"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def broken_links(text: str) -> list[str]:
    """Relative link targets that do not exist, anchors cut off."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t)]
    return [t for t in local if t and not (ROOT / t).exists()]


def missing_files(text: str) -> list[str]:
    """Files named in backticks, by a path with a known folder, that do not exist. Placeholders such as <family> are left alone."""
    named = re.findall(r"`((?:runtime|model|server|tools|tests|docs|\.ci)/[\w./-]+\.(?:py|md|json|jsonl|cfg|toml))`", text)
    return sorted({name for name in named if not (ROOT / name).exists()})


def env_table() -> str:
    rows = [f"| `{e.name}` | {e.kind.replace('|', 'or')} | {_default(e.default)} | {e.sentence} |" for e in ENV_TABLE]
    return "\n".join(["| variable | value | default | meaning |", "|---|---|---|---|", *rows])


def _default(value: object) -> str:
    return "unset" if value is None else f"`{int(value) if isinstance(value, bool) else value}`"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str) -> None:
    assert not broken_links(read(page))
    assert not missing_files(read(page))


def test_readme_gives_the_two_commands() -> None:
    text = read("README.md")
    assert SERVE in text and TEST in text
    assert TEST in read("CONTRIBUTING.md")


def test_ci_runs_the_readmes_test_command() -> None:
    """The same extras and the same pytest call, between the linters and the type checker."""
    script = read(".ci/run")
    extras = re.search(r"pip install -e '(\.\[[^]]+\])'", TEST)
    assert extras and f"-e '{extras[1]}'" in script
    order = [script.index(step) for step in ("ruff", "mypy", "-m pytest -q -n auto --dist loadfile")]
    assert order == sorted(order)


def test_environment_table_is_the_codes() -> None:
    written = re.search(r"<!-- env -->\n(.*?)\n?<!-- /env -->", read("CONTRIBUTING.md"), re.S)
    assert written and written[1] == env_table(), f"paste this between the env marks of CONTRIBUTING.md:\n{env_table()}"


def test_the_example_op_is_a_legal_entry() -> None:
    """The signature that CONTRIBUTING teaches with parses, and is not taken."""
    signature = re.search(r'"clamp",\n\s+"([^"]+)"', read("CONTRIBUTING.md"))
    assert signature and parse(signature[1]).symbols == {"M", "H"}
    assert "clamp" not in OPS


def test_a_broken_link_and_a_missing_file_are_found() -> None:
    assert broken_links("[a](README_NOT.md#x) [b](https://example.org/x.md) [c](setup.cfg) [d](#here)") == ["README_NOT.md"]
    assert missing_files("`runtime/nothing_here.py` `runtime/types.py` `tests/<x>.py`") == ["runtime/nothing_here.py"]
