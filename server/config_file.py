"""--config FILE: options in YAML (or JSON, which is YAML), written as the flags without their dashes.

    model: /models/kimi-k2.6
    max-num-seqs: 32
    enable-prefix-caching: false
    speculative-config: {method: ddtree, tree_budget: 16}

What the command line says wins.
"""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from server.options import OptionError


def parse_with_config(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The options of a file named by --config, then those of argv. Raises OptionError naming file and key."""
    given = parser.parse_args(argv)
    if given.config is None:
        return given
    values = read_config(given.config)
    if given.model is not None or given.model_flag is not None:
        values = {key: value for key, value in values.items() if key not in ("model", "model-path")}
    return parser.parse_args([*flags_of(parser, values, given.config), f"--config={given.config}", *argv])  # ends a list of values


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a file, underscores in its keys turned to dashes. Only plain YAML: no tag makes an object."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise OptionError(f"--config {path}: want options, one a line, as KEY: VALUE")
    return {key.replace("_", "-"): value for key, value in found.items()}


def flags_of(parser: argparse.ArgumentParser, values: dict[str, Any], path: Path) -> list[str]:
    """The options as command-line words. Raises OptionError for a key that is no option, or a value it can not have."""
    actions = {name[2:]: action for action in parser._actions for name in action.option_strings if name.startswith("--")}
    words: list[str] = []
    for key, value in values.items():
        action = actions.get(key)
        if action is None or key in ("config", "help"):
            near = difflib.get_close_matches(key, actions, 1)
            hint = f"; did you mean {near[0]}?" if near else "; `--help` lists the options"
            raise OptionError(f"--config {path}: {key!r} is not an option{hint}")
        if value is None:
            continue
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise OptionError(f"--config {path}: {key}: want true or false, not {value!r}")
            if value or f"no-{key}" in actions:
                words.append(f"--{key}" if value else f"--no-{key}")
            continue
        if isinstance(value, list) and action.nargs == "+":
            words += [f"--{key}", *map(str, value)]
            continue
        if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
            raise OptionError(f"--config {path}: {key}: takes one value, not a list")
        for entry in value if isinstance(value, list) else [value]:
            words.append(f"--{key}={json.dumps(entry) if isinstance(entry, (dict, bool)) else entry}")
    return words
