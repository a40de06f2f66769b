"""A checkpoint that is nowhere: every weight a hash of its name and index, for sizes that have no files.

Has what a loader asks of `model.weights.Checkpoint`. A tensor's slice is the slice of the whole tensor, so ranks agree; a device
writes its own slices (kernels_cu/fill.cu), the host computes them (runtime/hashed.py), and both have the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from model.shards import ITEM_BYTES, CheckpointError
from model.weights import legal_tp_sizes
from runtime.hashed import hashed
from runtime.source import HashWindow, Source, Triple
from runtime.types import Array
from runtime.w4 import GROUP

CODE_SPREAD = 4.18  # standard deviation of code - 8
Spec = Mapping[str, tuple[tuple[int, ...], str]]


class DummyCheckpoint:
    """The tensors that `expect` names, each of the role that its name says: linear maps keep unit variance, norms are near 1.

    config: config.json as a dictionary; folder: for messages. Raises CheckpointError where a slice does not lie inside.
    """

    quantised = True

    def __init__(self, config: dict[str, Any], folder: Path, seed: int = 0) -> None:
        self.config, self.folder, self.seed = config, folder, seed
        self.text_config: dict[str, Any] = config.get("text_config", config)
        self._spec: Spec = {}

    def __enter__(self) -> DummyCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""

    @property
    def total_bytes(self) -> int:
        return sum(int(np.prod(shape)) * ITEM_BYTES[dtype] for shape, dtype in self._spec.values())

    def expect(self, spec: Spec) -> None:
        """Takes the list of tensors as its own."""
        self._spec = spec

    def source(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Source:
        """A tensor, or rows and columns of it. Slices have step 1."""
        if name not in self._spec:
            raise CheckpointError(f"{self.folder} (dummy) holds no tensor {name!r} among its {len(self._spec)}")
        shape, dtype = self._spec[name]
        if cols is not None and len(shape) < 2:
            raise CheckpointError(f"{self.folder} (dummy): {name} has shape {shape}: it can not be cut by columns {cols}")
        cuts = [self._bounds(name, size, cut) for size, cut in zip(shape, (rows, cols), strict=False)]
        spans = [(0, 1)] * (2 - len(cuts)) + cuts
        mean, spread = _values(name, shape)
        key = zlib.crc32(f"{self.seed}/{name}".encode())
        window = HashWindow(key, mean, spread, dtype, shape[-1], spans[0], spans[1])
        kept = tuple(stop - start for start, stop in cuts)
        return Source(kept, dtype, (window,), (lambda: hashed(window).reshape(kept),))

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Array:
        return self.source(name, rows, cols).read()

    def triple(self, prefix: str, rows: slice | None = None, cols: slice | None = None) -> Triple:
        """An INT4 matrix, or a window of it in whole groups; codes have mean 8, scales are positive."""
        name = f"{prefix}.weight_packed"
        k = self.source(name).shape[1] * 8
        start, stop = self._bounds(name, k, cols)
        if start % GROUP or stop % GROUP:
            raise CheckpointError(
                f"{self.folder} (dummy): columns {start}:{stop} of {name} ({k} inputs) split a group of {GROUP} that shares one scale; "
                f"this width can be cut for tensor-parallel sizes {legal_tp_sizes(k)}"
            )
        words = self.source(name, rows, slice(start // 8, stop // 8))
        return Triple(words, self.source(f"{prefix}.weight_scale", rows, slice(start // GROUP, stop // GROUP)))

    def _bounds(self, name: str, size: int, cut: slice | None) -> tuple[int, int]:
        start = 0 if cut is None or cut.start is None else int(cut.start)
        stop = size if cut is None or cut.stop is None else int(cut.stop)
        if not 0 <= start < stop <= size or (cut is not None and cut.step not in (None, 1)):
            raise CheckpointError(f"{self.folder} (dummy): {name}: {cut} does not lie inside 0:{size} with step 1")
        return start, stop


def _values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and spread of a tensor's numbers by its role."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.0  # experts are chosen evenly
    if name.endswith("weight_scale"):
        scale = float((shape[-1] * GROUP) ** -0.5 / CODE_SPREAD)
        return scale, scale / 4  # never negative: the hash reaches 3.5 spreads
    return 0.0, 1.0 if "embed_tokens" in name else float(shape[-1] ** -0.5)


def override_config(config: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json with keys of its text model replaced. Raises ValueError for a key that is not there."""
    made = dict(config)
    nested = isinstance(made.get("text_config"), dict)
    text = dict(made["text_config"]) if nested else made
    for key, value in overrides.items():
        if key not in text:
            raise ValueError(f"hf_overrides: {key!r} is no key of the text model in {where}; it has {', '.join(sorted(text))}")
        text[key] = value
    if nested:
        made["text_config"] = text
    return made
