"""Tokens of the training text: documents and conversations as uint16 streams, split into training, held out and prompts for the drafter."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.messages import sort_keys
from model.tokenizer import Tokenizer
from model.tools_ts import declare
from runtime.types import Array
from tools.train_demo import sources
from tools.train_demo.chats import Conversation, everyday, from_code, from_manual, join_pairs, small_talk
from tools.train_demo.sources import Document
from tools.train_demo.tool_calls import tool_conversations

LONGEST_CHAT = 1000  # tokens
LONGEST_PROMPT = 160
TOOL_CHATS = 6000
SMALL_TALK = 1200
PAIRS = 0.05  # two-turn conversations made of pairs, as a share of the plain ones
PARTS = ("core", "more", "chat", "held_text", "held_chat", "prompt_text", "prompt_chat")


@dataclass(frozen=True, slots=True)
class Stream:
    """Pieces laid end to end: ids [n] uint16, start [pieces] int64; for conversations the length of each prompt, else 0."""

    ids: Array
    start: Array
    prompt: Array

    @staticmethod
    def of(pieces: Sequence[tuple[Array, int]]) -> Stream:
        lengths = np.array([0] + [len(ids) for ids, _ in pieces], np.int64)
        ids = np.concatenate([ids for ids, _ in pieces]) if pieces else np.empty(0, np.uint16)
        return Stream(ids, np.cumsum(lengths)[:-1], np.array([prompt for _, prompt in pieces], np.int64))

    def __len__(self) -> int:
        return len(self.ids)


Corpus = dict[str, Stream]


def render(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], int]:
    """Ids of a whole conversation, and how many of them stand before the last user turn's answer (the generation prompt).

    The layout is that of chat_template.jinja; tests compare the two. Without reasoning the prompt ends behind `</think>`.
    """
    special = tokenizer.special
    pieces: list[str | int] = []
    prompt: list[str | int] = []

    def open_message(role: str, marker: str) -> None:
        pieces.extend((special[marker], role, special["<|im_middle|>"]))

    if conversation.tools:
        open_message("tool_declare", "<|im_system|>")
        pieces.extend((declare([sort_keys(tool) for tool in conversation.tools]), special["<|im_end|>"]))
    for i, message in enumerate(conversation.messages):
        role = message["role"]
        open_message(role, {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(role, "<|im_system|>"))
        if role == "assistant":
            thought = message.get("reasoning", "")
            pieces.append(special["<think>"])
            if conversation.messages[i - 1]["role"] == "user":
                prompt = [*pieces] if thought else [*pieces, special["</think>"]]
            pieces.extend((thought, special["</think>"]))
        if role == "tool":
            pieces.append(f"## Return of {message['tool_call_id']}\n")
        pieces.append(message["content"])
        if message.get("tool_calls"):
            pieces.append(special["<|tool_calls_section_begin|>"])
            for call in message["tool_calls"]:
                pieces.extend((special["<|tool_call_begin|>"], call["id"], special["<|tool_call_argument_begin|>"]))
                pieces.extend((call["function"]["arguments"], special["<|tool_call_end|>"]))
            pieces.append(special["<|tool_calls_section_end|>"])
        pieces.append(special["<|im_end|>"])
    return tokenizer.encode_pieces(pieces), len(tokenizer.encode_pieces(prompt))


class _Worker:
    """What a process keeps between documents."""

    tokenizer: Tokenizer

    @classmethod
    def start(cls, folder: str) -> None:
        cls.tokenizer = Tokenizer.load(folder)

    @classmethod
    def document(cls, document: Document) -> tuple[Array, list[tuple[str, Array, int]]]:
        """The text's ids with [EOS] behind them, and the conversations made of it: (use, ids, prompt length)."""
        ids = cls.tokenizer.encode(document.text)
        ids.append(cls.tokenizer.special["[EOS]"])
        found = from_code(document) if document.kind == "py" else from_manual(document) if document.kind == "rst" else iter(())
        return np.array(ids, np.uint16), cls.conversations(list(found) if document.source != "rich" else [])

    @classmethod
    def conversations(cls, conversations: Iterable[Conversation]) -> list[tuple[str, Array, int]]:
        made = []
        for conversation in conversations:
            ids, prompt = render(cls.tokenizer, conversation)
            if len(ids) <= LONGEST_CHAT:
                made.append((conversation.use, np.array(ids, np.uint16), prompt))
        return made


def build(documents: Sequence[Document], tokenizer_folder: Path, processes: int, seed: int = 0) -> Corpus:
    """Encodes documents and conversations; pieces are shuffled within each part."""
    parts: dict[str, list[tuple[Array, int]]] = {name: [] for name in PARTS}
    for_chat = {"train": "chat", "held_out": "held_chat", "prompt_only": "prompt_chat"}
    context = multiprocessing.get_context("spawn" if processes > 1 else None)
    with context.Pool(processes, _Worker.start, (str(tokenizer_folder),)) as pool:
        for document, (ids, chats) in zip(documents, pool.imap(_Worker.document, documents, chunksize=16), strict=True):
            if document.held_out:
                if document.core:
                    parts["held_text"].append((ids, 0))
            else:
                parts["prompt_text" if document.prompt_only else "core" if document.core else "more"].append((ids, 0))
            for use, chat, prompt in chats:
                if use != "held_out" or document.core:
                    parts[for_chat[use]].append((chat, prompt))
    made = [*tool_conversations(TOOL_CHATS), *small_talk(SMALL_TALK), *join_pairs(list(everyday()), PAIRS, seed)]
    _Worker.start(str(tokenizer_folder))
    for use, chat, prompt in _Worker.conversations(made):
        parts[for_chat[use]].append((chat, prompt))
    rng = np.random.default_rng(seed)
    return {name: Stream.of([pieces[i] for i in rng.permutation(len(pieces))]) for name, pieces in parts.items()}


def save(corpus: Corpus, manifest: dict[str, Any], path: Path) -> None:
    arrays = {f"{name}.{part}": getattr(stream, part) for name, stream in corpus.items() for part in ("ids", "start", "prompt")}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, manifest=np.array(json.dumps(manifest)), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> tuple[Corpus, dict[str, Any]]:
    with np.load(path) as held:
        corpus = {name: Stream(*(held[f"{name}.{part}"] for part in ("ids", "start", "prompt"))) for name in PARTS}
        return corpus, json.loads(str(held["manifest"]))


def prepare(archive: Path, packages: Path, tokenizer_folder: Path, processes: int) -> tuple[Corpus, dict[str, Any]]:
    """Reads every source and encodes it; the manifest says what was read and how many tokens each part has."""
    documents = sources.read_all(archive, packages)
    corpus = build(documents, tokenizer_folder, processes)
    manifest = sources.manifest(documents, archive)
    manifest["tokens"] = {name: len(stream) for name, stream in corpus.items()}
    return corpus, manifest
