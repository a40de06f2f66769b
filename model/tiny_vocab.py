"""Tokenizer files for a vocabulary of any size, cut from the demo model's: base tokens, then the special ids in K2's order."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parent / "demo"

ESSENTIAL = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<think>",
    "</think>",
    "[UNK]",
    "[PAD]",
)
# What a vocabulary of fewer than 256 single bytes keeps, most wanted first.
BYTES = b" etaoinshrdlcumwfgypbvkjxqz\n.,0123456789:?!-'\"()ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST = 16  # bytes of a made-up token


def special_tokens(vocab_size: int) -> dict[str, int]:
    """The named special ids, the last ones of the vocabulary: 256 from 65,536 tokens on (K2.6's own ids at 163,840), 64 from 320
    on as in the demo, and below that the eleven without which the chat format can not be written.
    """
    if vocab_size < len(ESSENTIAL) + 1:
        raise ValueError(f"vocab_size {vocab_size} is too small: {len(ESSENTIAL)} special tokens and one byte make {len(ESSENTIAL) + 1}")
    if vocab_size < 320:
        return {name: vocab_size - len(ESSENTIAL) + i for i, name in enumerate(ESSENTIAL)}
    base = vocab_size - (256 if vocab_size >= 65536 else 64)
    demo = {entry["content"]: int(i) for i, entry in _demo_config()["added_tokens_decoder"].items()}
    first, last = min(demo.values()), max(demo.values())
    return {name: vocab_size - 1 - (last - i) if name in ("[UNK]", "[PAD]") else base + i - first for name, i in demo.items()}


def base_tokens(count: int) -> list[bytes]:
    """`count` byte strings by rank: single bytes, then the demo's merges, then pairs of those that exist for their number alone."""
    if count < 256:
        return [bytes([b]) for b in (*BYTES, *sorted(set(range(256)) - set(BYTES)))][:count]
    lines = (DEMO / "tiktoken.model").read_text("ascii").splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines[:count]]
    seen = set(tokens)
    for left, right in itertools.product(tuple(tokens), repeat=2):
        if len(tokens) == count:
            return tokens
        if len(left + right) <= LONGEST and left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
    if len(tokens) < count:
        raise ValueError(f"vocab_size asks for {count} base tokens; pairs of the demo's make {len(tokens)}")
    return tokens


def write_tokenizer(folder: Path, vocab_size: int, max_positions: int) -> dict[str, int]:
    """Writes tiktoken.model, tokenizer_config.json and chat_template.jinja; returns the special ids by name."""
    special = special_tokens(vocab_size)
    tokens = base_tokens(min(special.values()))
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines), "ascii")
    config = _demo_config()
    entries = {entry["content"]: entry for entry in config["added_tokens_decoder"].values()}
    config["added_tokens_decoder"] = {str(i): entries[name] for name, i in special.items()}
    config["additional_special_tokens"] = [name for name in config["additional_special_tokens"] if name in special]
    config["model_max_length"] = max_positions
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "chat_template.jinja").write_bytes((DEMO / "chat_template.jinja").read_bytes())
    return special


def _demo_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEMO / "tokenizer_config.json").read_text("utf-8"))
    return config
