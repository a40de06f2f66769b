"""Threshold: a PyTorch-free runtime for INT4 mixture-of-experts models with DDTree speculative decoding.

    from runtime import LLM, SamplingParams
    LLM("demo", speculative_config={"method": "ddtree"}).generate("def add(a, b):", SamplingParams(temperature=0))

Names are loaded on first use, so `import runtime` costs nothing and needs no GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from runtime.api import LLM, Loaded, RequestOutput, load
    from runtime.config import EngineConfig, SpeculativeConfig
    from runtime.engine import Engine
    from runtime.types import SamplingParams

_HOME = {
    "LLM": "runtime.api",
    "Loaded": "runtime.api",
    "RequestOutput": "runtime.api",
    "load": "runtime.api",
    "EngineConfig": "runtime.config",
    "SpeculativeConfig": "runtime.config",
    "Engine": "runtime.engine",
    "SamplingParams": "runtime.types",
}

__all__ = ["LLM", "Engine", "EngineConfig", "Loaded", "RequestOutput", "SamplingParams", "SpeculativeConfig", "load"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
