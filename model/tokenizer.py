"""Kimi's byte-level BPE: text to token ids and back, whole or as a stream.

A checkpoint brings `tiktoken.model` (a line for each base token: base64 of its bytes, a space, its
rank, which is its id) and names its special tokens in `tokenizer_config.json`. Ids are resolved by
string; every id between the base tokens and `vocab_size` is special, named or reserved.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from codecs import utf_8_decode
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiktoken

# How text falls into pieces before BPE; the first alternative that matches wins.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",  # 1: a run of Han characters, alone: they carry no spaces to lean on
        # 2: a word ending in lower case, with at most one leading mark or space, and an English suffix
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        # 3: the same for words in upper case, perhaps with a lower-case tail: "HTTPServer" is HTTPServer
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",  # 4: digits by threes, from the left
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # 5: punctuation with the line ends after it
        r"\s*[\r\n]+",  # 6: white space up to the last line end
        r"\s+(?!\S)",  # 7: white space, less the one character that belongs to the next word
        r"\s+",  # 8: what is left of it
    )
)

# Kimi's own encoder cuts text here, so ids agree at any length; without the cut, 1.5 million spaces
# overflow tiktoken's stack, and that panic is no Exception.
SLICE_CHARS = 400_000
RUN_CHARS = 25_000  # … and cuts runs of only white space or only other characters here
SPECIALS_LIMIT = 65_536  # a vocab_size far above the base tokens is a wrong file, not a long list of reserved ids

_LONG_RUN = re.compile(rf"(?<!\S)\S{{{RUN_CHARS + 1},}}|(?<!\s)\s{{{RUN_CHARS + 1},}}")


class TokenizerError(ValueError):
    """Tokenizer files that contradict themselves or each other; the text names file and values."""


def split_long(text: str) -> Iterator[str]:
    """Parts of `text`, in order, that are encoded on their own.

    A part has at most 400,000 characters and no more than 25,000 in a row that are all white space
    or all not. Linear in len(text): a run is looked at only from its first character.
    """
    for start in range(0, len(text), SLICE_CHARS):
        part = text[start : start + SLICE_CHARS]
        cut = 0
        for run in _LONG_RUN.finditer(part):
            for end in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                yield part[cut:end]
                cut = end
        yield part[cut:]


class TokenStream:
    """Text of a growing token list: the deltas joined are `Tokenizer.decode` of the whole list.

    Bytes of ordinary tokens are decoded as UTF-8 across tokens; an incomplete character waits for
    its rest, an invalid byte becomes U+FFFD. A special token ends the character before it, whether
    it is shown or not.
    """

    __slots__ = ("_base", "_names", "_pending")

    def __init__(self, base: list[bytes], names: list[str]) -> None:
        self._base = base  # [base tokens] bytes of each
        self._names = names  # [specials] text of each, "" if it is not shown
        self._pending = b""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` make certain. Raises ValueError for an id outside the vocabulary, and is then unchanged."""
        base, count = self._base, len(self._base)
        run = [self._pending]
        text = ""
        for token in ids:
            if 0 <= token < count:
                run.append(base[token])
                continue
            if not count <= token < count + len(self._names):
                raise ValueError(f"token id {token} is outside the vocabulary [0, {count + len(self._names)})")
            text += b"".join(run).decode("utf-8", "replace") + self._names[token - count]
            run = []
        data = b"".join(run)
        tail, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text + tail

    def flush(self) -> str:
        """U+FFFD if the stream ended inside a character, else nothing."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class Tokenizer:
    """Text to ids and back for one checkpoint.

    special: all special tokens by string, reserved ids included. hidden: the ids that
    skip_special_tokens drops (those marked special, and the reserved); tool markers and think tags
    are not among them. eos_ids: [EOS], <|im_end|> and what generation_config.json adds.
    Source: tiktoken's format, arXiv 1508.07909 for BPE.
    """

    def __init__(self, base: list[bytes], special: dict[str, int], hidden: frozenset[int], eos_ids: frozenset[int]) -> None:
        self._base = base
        self.special = special
        self.hidden = hidden
        self.eos_ids = eos_ids
        self.vocab_size = len(base) + len(special)
        names = sorted(special, key=special.__getitem__)
        self._shown_all = names
        self._shown = ["" if special[name] in hidden else name for name in names]
        self._bpe = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks={token: rank for rank, token in enumerate(base)}, special_tokens=special
        )

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Reads tiktoken.model, tokenizer_config.json, config.json and, if there, generation_config.json.

        Raises TokenizerError when ranks are not 0 … n-1, a single byte has no token, or base tokens
        and named specials do not fill `vocab_size`; FileNotFoundError when a file is missing.
        """
        folder = Path(directory)
        base = read_ranks(folder / "tiktoken.model")
        vocab_size = _vocab_size(folder / "config.json")
        special, hidden = _read_specials(folder, len(base), vocab_size)
        return cls(base, special, hidden, _read_eos(folder, special, vocab_size))

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text: ordinary tokens only, whatever it spells. A lone surrogate becomes U+FFFD."""
        if len(text) <= RUN_CHARS:
            return self._bpe.encode_ordinary(text)
        ids: list[int] = []
        for part in split_long(text):
            ids += self._bpe.encode_ordinary(part)
        return ids

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Ids of text with control tokens: a str is ordinary text, an int a token id.

        Neighbouring strings are joined first, so that merges cross their border exactly as in the
        joined text. Raises ValueError for an id outside the vocabulary.
        """
        ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                text.append(piece)
                continue
            if not 0 <= piece < self.vocab_size:
                raise ValueError(f"token id {piece} is outside the vocabulary [0, {self.vocab_size})")
            if text:
                ids += self.encode("".join(text))
                text = []
            ids.append(piece)
        if text:
            ids += self.encode("".join(text))
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, by the rule of TokenStream. Raises ValueError for an id outside the vocabulary."""
        stream = self.stream(skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; of a special token, its string in UTF-8. Raises ValueError outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary [0, {self.vocab_size})")
        count = len(self._base)
        return self._base[token] if token < count else self._shown_all[token - count].encode()

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A fresh stream; it shares the tables, so it costs nothing to make."""
        return TokenStream(self._base, self._shown if skip_special_tokens else self._shown_all)


def read_ranks(path: Path) -> list[bytes]:
    """Token bytes by rank. Raises TokenizerError naming the line, the gap, the duplicate or the missing byte."""
    tokens: dict[int, bytes] = {}
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        fields = line.split()
        try:
            if len(fields) != 2 or not fields[1].isdigit():
                raise ValueError("expected base64, a space and a rank")
            token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"{path}, line {number}: {line[:60]!r}: {error}") from error
        if not token:
            raise TokenizerError(f"{path}, line {number}: rank {rank} has no bytes")
        if rank in tokens or token in ranks:
            other = f"rank {rank} is {tokens[rank]!r} already" if rank in tokens else f"these bytes have rank {ranks[token]} already"
            raise TokenizerError(f"{path}, line {number}: {token!r} with rank {rank}, but {other}")
        tokens[rank], ranks[token] = token, rank
    if not tokens:
        raise TokenizerError(f"{path}: holds no token")
    if max(tokens) != len(tokens) - 1:
        gap = next(rank for rank in range(len(tokens)) if rank not in tokens)
        raise TokenizerError(f"{path}: {len(tokens)} ranks, the highest {max(tokens)}; rank {gap} is missing. Ranks must be 0 … n-1")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: {len(missing)} of the 256 single bytes have no token, the first 0x{missing[0]:02x}")
    return [tokens[rank] for rank in range(len(tokens))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: a JSON {type(value).__name__} where an object is needed")
    return value


def _vocab_size(path: Path) -> int:
    config = _read_json(path)
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise TokenizerError(f"{path}: vocab_size is {size!r}, not a positive integer")
    return size


def _read_specials(folder: Path, base: int, vocab_size: int) -> tuple[dict[str, int], frozenset[int]]:
    path = folder / "tokenizer_config.json"
    if not 0 < vocab_size - base <= SPECIALS_LIMIT:
        raise TokenizerError(
            f"{folder / 'tiktoken.model'} has {base} tokens and {folder / 'config.json'} a vocab_size of {vocab_size}: "
            f"{vocab_size - base} special tokens, where 1 to {SPECIALS_LIMIT} are possible. The files belong to different models"
        )
    decoder = _read_json(path).get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder is a {type(decoder).__name__}, not an object")
    names: dict[int, str] = {}
    hidden: set[int] = set()
    for key, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or not isinstance(content, str) or not content:
            raise TokenizerError(f"{path}: added_tokens_decoder[{key!r}] is {entry!r}: an integer key and a content string are needed")
        token = int(key)
        if not base <= token < vocab_size:
            raise TokenizerError(f"{path}: {content!r} has id {token}, outside the special ids [{base}, {vocab_size})")
        names[token] = content
        if entry.get("special", False):
            hidden.add(token)
    special: dict[str, int] = {}
    for token in range(base, vocab_size):
        if token not in names:
            hidden.add(token)
        name = names.get(token, f"<|reserved_token_{token}|>")
        if name in special:
            raise TokenizerError(f"{path}: ids {special[name]} and {token} are both named {name!r}")
        special[name] = token
    return special, frozenset(hidden)


def _read_eos(folder: Path, special: dict[str, int], vocab_size: int) -> frozenset[int]:
    found = {special[name] for name in ("[EOS]", "<|im_end|>") if name in special}
    path = folder / "generation_config.json"
    value = _read_json(path).get("eos_token_id") if path.exists() else None
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise TokenizerError(f"{path}: eos_token_id {token!r} is no id in [0, {vocab_size})")
        found.add(token)
    if not found:
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: names neither [EOS] nor <|im_end|>, and {path} no eos_token_id")
    return frozenset(found)
