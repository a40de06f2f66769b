"""Ways to damage a checkpoint folder, for the tests of what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.weights import Checkpoint, CheckpointError

EXPERT = "model.layers.1.mlp.experts.3.down_proj"
STORED = f"language_model.{EXPERT}"
SHARD = "model-00002-of-000003.safetensors"  # layer 1, the one with experts
HEAD = "model-00003-of-000003.safetensors"  # embedding, head, last norm


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edit_json(folder / "model.safetensors.index.json", change)


def edit_shard(folder: Path, file: str, change: Callable[[dict[str, np.ndarray]], None], keep_index: bool = True) -> None:
    """Rewrites a shard; the index's total_size follows, so that only the change itself can be refused."""
    tensors = load_file(folder / file)
    before = sum(t.nbytes for t in tensors.values())
    change(tensors)
    save_file(tensors, folder / file)
    grown = sum(t.nbytes for t in tensors.values()) - before

    def follow(index: dict[str, Any]) -> None:
        index["metadata"]["total_size"] += grown
        if not keep_index:
            index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file} | dict.fromkeys(tensors, file)

    edit_index(folder, follow)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)
