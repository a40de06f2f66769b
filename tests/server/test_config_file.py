"""--config: flags in a file, refused by name where there is no such flag, overruled by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.config_file import parse_with_config
from server.options import OptionError, model_of
from tools.serve import make_parser


def parse(tmp_path: Path, text: str, *argv: str) -> object:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return parse_with_config(make_parser(), ["--config", str(path), *argv])


def test_a_file_says_what_flags_say(tmp_path: Path) -> None:
    text = """
model: /models/kimi
max-num-seqs: 4
tensor_parallel_size: 2
enable-prefix-caching: false
access-log: true
api-key: [one, two]
speculative-config: {method: ddtree, tree_budget: 16}
port: 9000
ssl-certfile:
"""
    args = parse(tmp_path, text)
    assert model_of(args) == "/models/kimi"
    assert (args.max_num_seqs, args.tensor_parallel_size, args.port, args.access_log) == (4, 2, 9000, True)
    assert args.prefix_caching is False and args.api_key == ["one", "two"] and args.ssl_certfile is None
    assert json.loads(args.speculative_config) == {"method": "ddtree", "tree_budget": 16}


def test_the_command_line_wins(tmp_path: Path) -> None:
    args = parse(tmp_path, "model: a\nport: 1\nmax-num-seqs: 2\n", "b", "--port", "3")
    assert (model_of(args), args.port, args.max_num_seqs) == ("b", 3, 2)
    assert model_of(parse(tmp_path, "model-path: a\n", "--model", "b")) == "b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq: 3", "did you mean max-num-seqs?"),
        ("kv-connector: x", "'kv-connector' is not an option"),
        ("config: other.yaml", "'config' is not an option"),
        ("port: [1, 2]", "port: takes one value"),
        ("access-log: 7", "access-log: want true or false, not 7"),
        ("- port", "KEY: VALUE"),
        ("", "KEY: VALUE"),
        ("port: {", "not YAML"),
        ("x: !!python/object/apply:os.system [ls]", "not YAML"),
        ("7: 8", "KEY: VALUE"),
    ],
)
def test_what_is_no_option_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(OptionError, match=r"^--config .*serve\.yaml: ") as caught:
        parse(tmp_path, text)
    assert said in str(caught.value)


def test_a_bad_value_ends_as_a_flag_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(tmp_path, "port: many")
    assert caught.value.code == 2 and "--port" in capsys.readouterr().err
