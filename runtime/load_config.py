"""Where a model's weights come from: what is told at start beside the model's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """load_format auto: the checkpoint's files; dummy: a hash of each weight's name and index, so that config.json is enough.
    hf_overrides: keys of config.json's text model that take these values instead. Names are vLLM's; a bad one raises ValueError.
    cut_latent: ranks hold a part of q_a and kv_a each, and gather the products (docs/ranks.md).
    """

    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    cut_latent: bool = False

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format: {self.load_format!r} is none of {', '.join(LOAD_FORMATS)}")

    @property
    def dummy(self) -> bool:
        return self.load_format == "dummy"

    @staticmethod
    def parse(load_format: str = "auto", hf_overrides: Mapping[str, Any] | str | None = None) -> LoadConfig:
        """Takes the overrides as a mapping or as its JSON text."""
        given: Any = hf_overrides or {}
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ValueError(f"hf_overrides: not JSON: {hf_overrides!r} ({error})") from None
        if not isinstance(given, Mapping):
            raise ValueError(f"hf_overrides: want a JSON object, not {type(given).__name__}")
        return LoadConfig(load_format, dict(given))


FROM_FILES = LoadConfig()
