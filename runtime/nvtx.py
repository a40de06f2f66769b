"""NVTX ranges around the stages of a step, for Nsight Systems: only where `RUNTIME_NVTX` asks for them.

GPU-unverified: the ranges have not been seen in a profile yet. Whatever runs inside a replayed CUDA graph has none of its own;
`verify` covers the whole of it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

LOG = logging.getLogger(__name__)
LIBRARIES = (("nvtx", "push_range", "pop_range"), ("cupy.cuda.nvtx", "RangePush", "RangePop"))  # NVIDIA's own package, then CuPy's


class Ranges(Protocol):
    """Nested ranges of one thread."""

    def push(self, name: str) -> None: ...

    def pop(self) -> None: ...


class NvtxRanges:
    """Ranges through two functions of an NVTX binding."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop

    def push(self, name: str) -> None:
        self._push(name)

    def pop(self) -> None:
        self._pop()


def find_ranges(load: Callable[[str], Any] = importlib.import_module) -> NvtxRanges | None:
    """The ranges of the first NVTX binding that is installed; None, with a warning, where there is none."""
    for module, push, pop in LIBRARIES:
        try:
            found = load(module)
        except ImportError:
            continue
        return NvtxRanges(getattr(found, push), getattr(found, pop))
    LOG.warning("RUNTIME_NVTX is set, but neither nvtx nor CuPy is installed: pip install nvtx")
    return None
