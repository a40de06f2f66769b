"""Every environment variable of the runtime, in one typed table.

A value that does not parse is refused, and so is a RUNTIME_* name that is nearly one of the table:
a misspelt switch that silently does nothing costs hours.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Env:
    """The parsed environment; field `check_shapes` is the variable RUNTIME_CHECK_SHAPES, and so on."""

    check_shapes: bool = False
    test_level: int = 1
    shim_sanitize: bool = False
    log_level: str = "info"
    api_key: str | None = field(default=None, repr=False)
    cache_dir: Path | None = None
    nvtx: bool = False
    stage_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """One row of the table: the variable's name, what it accepts, its default, one sentence."""

    name: str
    kind: str
    default: Any
    sentence: str
    parse: Callable[[str], Any]

    @property
    def field(self) -> str:
        return self.name.removeprefix("RUNTIME_").lower()


def _parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError("want one of 1, true, yes, on, 0, false, no, off") from None


def _parse_int(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"want an integer in [{low}, {high}]") from None
        if not low <= value <= high:
            raise ValueError(f"want an integer in [{low}, {high}]")
        return value

    return parse


def _parse_choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in choices:
            raise ValueError(f"want one of {', '.join(choices)}")
        return value

    return parse


def _parse_secret(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank; unset it to go without")
    return text


def _parse_dir(text: str) -> Path:
    if not text.strip():
        raise ValueError("is blank; unset it for the default")
    return Path(text).expanduser()


def _entry(name: str, kind: str, sentence: str, parse: Callable[[str], Any]) -> EnvEntry:
    field_name = name.removeprefix("RUNTIME_").lower()
    default = next(f.default for f in dataclasses.fields(Env) if f.name == field_name)
    return EnvEntry(name, kind, default, sentence, parse)


ENV_TABLE: tuple[EnvEntry, ...] = (
    _entry("RUNTIME_CHECK_SHAPES", "bool", "Check shapes and dtypes of every op call (5 us each, 0.5 ms a demo step).", _parse_bool),
    _entry("RUNTIME_TEST_LEVEL", "int 1..3", "How large the grids of the tests are: 1 in CI, 3 before a release.", _parse_int(1, 3)),
    _entry("RUNTIME_SHIM_SANITIZE", "bool", "Tests build kernels for AddressSanitizer (CONTRIBUTING.md).", _parse_bool),
    _entry("RUNTIME_LOG_LEVEL", " | ".join(LOG_LEVELS), "The least severe message that the server logs.", _parse_choice(LOG_LEVELS)),
    _entry("RUNTIME_API_KEY", "text", "If set, the server refuses /v1 requests without this bearer token.", _parse_secret),
    _entry(
        "RUNTIME_CACHE_DIR",
        "folder",
        "Where compiled kernels and cost curves are kept; unset: runtime in $XDG_CACHE_HOME or ~/.cache.",
        _parse_dir,
    ),
    _entry("RUNTIME_NVTX", "bool", "Mark the stages of a step as NVTX ranges, for Nsight Systems.", _parse_bool),
    _entry("RUNTIME_STAGE_TOKEN", "text", "The secret that the nodes of one model share (--master-addr).", _parse_secret),
)


def load_env(environ: Mapping[str, str] | None = None) -> Env:
    """Parses the RUNTIME_* variables of `environ` (default: os.environ) into an Env.

    ValueError names the variable, its value and what it accepts; a RUNTIME_* name close to one of
    the table is refused with the name that was probably meant. The values of secrets are
    never repeated in an error.
    """
    environ = os.environ if environ is None else environ
    known = [entry.name for entry in ENV_TABLE]
    for name in environ:
        if name.startswith("RUNTIME_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                raise ValueError(f"environment variable {name} is not read by this runtime; did you mean {near[0]}?")
    values: dict[str, Any] = {}
    for entry in ENV_TABLE:
        if entry.name not in environ:
            continue
        text = environ[entry.name]
        try:
            values[entry.field] = entry.parse(text)
        except ValueError as error:
            shown = "" if entry.parse is _parse_secret else f"={text!r}"
            raise ValueError(f"environment variable {entry.name}{shown}: {error}") from None
    return Env(**values)
