from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from runtime.env import ENV_TABLE, Env, load_env

ROOT = Path(__file__).resolve().parents[1]


def test_the_empty_environment_gives_the_defaults() -> None:
    assert load_env({}) == Env()
    assert load_env({"PATH": "/bin", "HOME": "/root"}) == Env()


def test_table_and_fields_are_the_same() -> None:
    assert [entry.field for entry in ENV_TABLE] == [f.name for f in dataclasses.fields(Env)]
    for entry in ENV_TABLE:
        assert entry.name.startswith("RUNTIME_") and entry.sentence.endswith(".")
        assert getattr(Env(), entry.field) == entry.default


GOOD = [
    ("RUNTIME_CHECK_SHAPES", "0", "check_shapes", False),
    ("RUNTIME_CHECK_SHAPES", "Yes", "check_shapes", True),
    ("RUNTIME_TEST_LEVEL", "3", "test_level", 3),
    ("RUNTIME_LOG_LEVEL", "DEBUG", "log_level", "debug"),
    ("RUNTIME_API_KEY", "s3cret", "api_key", "s3cret"),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_values_are_typed(name: str, text: str, field: str, value: object) -> None:
    assert getattr(load_env({name: text}), field) == value


BAD = [
    ("RUNTIME_CHECK_SHAPES", "maybe"),
    ("RUNTIME_CHECK_SHAPES", ""),
    ("RUNTIME_TEST_LEVEL", "4"),
    ("RUNTIME_TEST_LEVEL", "1.0"),
    ("RUNTIME_LOG_LEVEL", "loud"),
]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_by_name_and_value(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={text!r}: want")):
        load_env({name: text})


def test_a_key_is_never_shown() -> None:
    assert "s3cret" not in repr(load_env({"RUNTIME_API_KEY": "s3cret"}))
    with pytest.raises(ValueError, match="RUNTIME_API_KEY: is blank"):
        load_env({"RUNTIME_API_KEY": "  "})


def test_a_misspelt_name_is_refused_and_a_foreign_one_is_not() -> None:
    with pytest.raises(ValueError, match="did you mean RUNTIME_CHECK_SHAPES"):
        load_env({"RUNTIME_CHECK_SHAPE": "1"})
    assert load_env({"RUNTIME_CLASS": "gvisor"}) == Env()


def readers(field: str) -> list[str]:
    """Source files that read a field of the environment."""
    found = []
    for folder in ("runtime", "model", "server", "tools", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("env.py", "test_env.py") and re.search(rf"env(\(\))?\.{field}\b", path.read_text(encoding="utf-8")):
                found.append(path.name)
    return found


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Env)])
def test_every_variable_is_read_somewhere(field: str) -> None:
    assert readers(field), f"nothing reads env.{field}: remove it from the table or use it"
    assert not readers(field + "_of_nothing")


def test_no_file_reads_the_environment_behind_the_table() -> None:
    pattern = re.compile(r"""(?:environ|getenv)\W+["']?RUNTIME_\w+""")
    assert pattern.search('os.environ["RUNTIME_X"]') and pattern.search("os.getenv('RUNTIME_X')")
    for folder in ("runtime", "model", "server", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pattern.search(path.read_text(encoding="utf-8")), f"{path} reads a RUNTIME_ variable itself"
