"""A drafter for a target of which only some layers are built."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from runtime.load_config import LoadConfig


def fitting_drafter(drafter: str | None, weights: LoadConfig) -> str | None:
    """`drafter`, or its config cut as random weights cut the target (num_hidden_layers), where it is such a file."""
    layers = weights.hf_overrides.get("num_hidden_layers")
    if drafter and layers and weights.dummy and Path(drafter).is_file():
        return str(cut_drafter(Path(drafter), int(layers), Path(tempfile.mkdtemp(prefix="drafter-"))))
    return drafter


def cut_drafter(file: Path, layers: int, folder: Path) -> Path:
    """A drafter's config for a target cut to `layers` layers: as many of its own layers in proportion, and taps within reach.

    The whole drafter before a tenth of the target would be ten times too dear.
    """
    held = json.loads(file.read_text(encoding="utf-8"))
    inner, whole = held["dflash_config"], held["num_target_layers"]
    own = max(1, round(held["num_hidden_layers"] * layers / whole))
    taps = np.linspace(0, layers - 1, min(layers, len(inner["target_layer_ids"]))).round().astype(int).tolist()
    changes = {"num_hidden_layers": own, "layer_types": held["layer_types"][:own], "num_target_layers": layers}
    made = folder / file.name
    made.write_text(json.dumps({**held, **changes, "dflash_config": {**inner, "target_layer_ids": taps}}), encoding="utf-8")
    return made
