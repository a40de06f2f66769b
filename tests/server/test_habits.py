"""Options typed out of habit: what is so anyway is accepted, what is not is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config_file import parse_with_config
from server.habits import GRANTED, REFUSED
from server.options import OptionError
from tools.serve import make_parser, origins_of

KIMI = "/models/kimi -tp 8 --trust-remote-code --tool-call-parser kimi_k2 --reasoning-parser kimi_k2 --enable-auto-tool-choice"
SGLANG = (
    "--model-path /models/kimi --tp 8 --context-length 4096 --mem-fraction-static 0.9 --disable-cuda-graph --grammar-backend llguidance"
)


def test_the_usual_lines_start_a_server() -> None:
    plain = make_parser().parse_args(["/models/kimi", "-tp", "8"])
    assert make_parser().parse_args(KIMI.split()) == plain, "what is granted leaves no trace"
    args = make_parser().parse_args(SGLANG.split())
    assert (args.model_flag, args.tensor_parallel_size, args.max_model_len, args.enforce_eager) == ("/models/kimi", 8, 4096, True)
    assert make_parser().parse_args(["--disable-log-stats"]).log_stats_interval == 0


@pytest.mark.parametrize("name", [name for names in REFUSED for name in names])
def test_what_is_not_supported_is_named_with_what_to_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([name], [name, "x"]):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args(words)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and f"error: {name}: not supported; " in said


def test_another_value_than_ours_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for names, values in GRANTED.items():
        for name in names if values else ():
            make_parser().parse_args([name, values[0]])
            with pytest.raises(SystemExit):
                make_parser().parse_args([name, "other"])
            assert f"{name}: 'other' is not supported; {values[0]}" in capsys.readouterr().err


def test_help_names_what_is_granted_and_hides_the_rest() -> None:
    said = make_parser().format_help()
    assert "--trust-remote-code" in said and "--swap-space" not in said
    assert {name for names in GRANTED for name in names}.isdisjoint(name for names in REFUSED for name in names)


def test_a_file_may_hold_them_and_lists(tmp_path: Path) -> None:
    text = "trust-remote-code: true\ntool-call-parser: kimi_k2\ncudagraph-capture-sizes: [1, 8, 64]\nallowed-origins: ['*']\n"
    (tmp_path / "serve.yaml").write_text(text, encoding="utf-8")
    args = parse_with_config(make_parser(), ["folder", "--config", str(tmp_path / "serve.yaml")])
    assert (args.model, args.cudagraph_capture_sizes, args.allowed_origins) == ("folder", [1, 8, 64], ["*"])


def test_origins() -> None:
    assert origins_of(["https://a.org", "http://localhost:3000"]) == ("https://a.org", "http://localhost:3000")
    assert origins_of(['["*"]']) == ("*",) and origins_of([]) == ()
    for bad in ("a.org", "https://a.org/x", "[3]"):
        with pytest.raises(OptionError, match="--allowed-origins"):
            origins_of([bad])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-num-seq 3 --port 1", "unrecognized arguments: --max-num-seq; did you mean --max-num-seqs?"),
        ("--zzz", "unrecognized arguments: --zzz; --help lists the options"),
        ("--port many", "argument --port: invalid port_number value: 'many'; --help lists the options"),
    ],
)
def test_an_error_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(words.split())
    assert capsys.readouterr().err == f"python tools/serve.py: error: {said}\n"
