"""Tokenizer files: what they say, and how a broken one is named."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken

from model.tokenizer import Tokenizer, TokenizerError

DEMO = Path(__file__).parents[2] / "model" / "demo"
T = Tokenizer.load(DEMO)
BYTE = {T.token_bytes(i)[0]: i for i in range(T.vocab_size) if len(T.token_bytes(i)) == 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_lines(path: Path, change: Callable[[list[bytes]], object]) -> None:
    lines = path.read_bytes().splitlines()
    change(lines)
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_what_a_checkpoint_says() -> None:
    assert T.vocab_size == 4096 and len(T.special) == 64
    assert T.eos_ids == {T.special["[EOS]"], T.special["<|im_end|>"]} == {4033, 4034}
    assert isinstance(T._bpe, tiktoken.Encoding)


def test_flat_config_and_a_list_of_eos(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(vocab_size=c.pop("text_config")["vocab_size"]))
    edit_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=[4034, 4041]))
    assert Tokenizer.load(folder).eos_ids == {4033, 4034, 4041}
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_ids == {4033, 4034}


def test_ids_follow_the_strings(folder: Path) -> None:
    """Two names exchanged in the file are exchanged in the tokenizer: no id is taken for granted."""

    def swap(config: dict) -> None:
        added = config["added_tokens_decoder"]
        added["4034"], added["4035"] = added["4035"], added["4034"]

    edit_json(folder / "tokenizer_config.json", swap)
    (folder / "generation_config.json").unlink()
    loaded = Tokenizer.load(folder)
    assert loaded.special["<|im_end|>"] == 4035 and loaded.eos_ids == {4033, 4035}


def _gap(lines: list[bytes]) -> None:
    lines[4031] = lines[4031].split()[0] + b" 4040"


def _twice(lines: list[bytes]) -> None:
    lines[300] = lines[299].split()[0] + b" 300"


def _same_rank(lines: list[bytes]) -> None:
    lines[300] = lines[300].split()[0] + b" 299"


def _no_byte(lines: list[bytes]) -> None:
    lines[BYTE[0xFF]] = base64.b64encode(b"\xff\xff\xff\xff") + b" %d" % BYTE[0xFF]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_gap, "rank 4031 is missing"),
        (_twice, "line 301.*these bytes have rank 299"),
        (_same_rank, "line 301.*rank 299 is"),
        (_no_byte, "1 of the 256 single bytes.*0xff"),
        (lambda lines: lines.__setitem__(5, b"!!! 5"), "line 6"),
        (lambda lines: lines.__setitem__(5, b"QQ=="), "line 6"),
        (lambda lines: lines.__setitem__(5, b" 5"), "line 6"),
        (lambda lines: lines.clear(), "holds no token"),
    ],
)
def test_broken_ranks_are_named(folder: Path, change: Callable[[list[bytes]], object], said: str) -> None:
    edit_lines(folder / "tiktoken.model", change)
    with pytest.raises(TokenizerError, match=f"(?s)tiktoken.model.*{said}"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("vocab_size", [4031, 4032, 163_840])
def test_base_tokens_and_specials_must_fill_the_vocabulary(folder: Path, vocab_size: int) -> None:
    edit_json(folder / "config.json", lambda c: c["text_config"].update(vocab_size=vocab_size))
    with pytest.raises(TokenizerError, match=rf"tiktoken.model has 4032 tokens and .*config.json a vocab_size of {vocab_size}"):
        Tokenizer.load(folder)


def test_named_id_outside_the_specials(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c["text_config"].update(vocab_size=4095))
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json.*'\[PAD\]' has id 4095.*\[4032, 4095\)"):
        Tokenizer.load(folder)


def test_a_name_used_twice(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda c: c["added_tokens_decoder"]["4034"].update(content="[EOS]"))
    with pytest.raises(TokenizerError, match=r"4033 and 4034 are both named '\[EOS\]'"):
        Tokenizer.load(folder)


def test_eos_outside_the_vocabulary(folder: Path) -> None:
    for value in (4096, -1, True, "x"):
        edit_json(folder / "generation_config.json", lambda c, value=value: c.update(eos_token_id=value))
        with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id"):
            Tokenizer.load(folder)


def test_no_eos_at_all(folder: Path) -> None:
    for token in ("4033", "4034"):
        edit_json(folder / "tokenizer_config.json", lambda c, token=token: c["added_tokens_decoder"].pop(token))
    (folder / "generation_config.json").unlink()
    with pytest.raises(TokenizerError, match="eos_token_id"):
        Tokenizer.load(folder)


def test_broken_json_and_missing_files(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"config\.json: no JSON"):
        Tokenizer.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Tokenizer.load(folder)
