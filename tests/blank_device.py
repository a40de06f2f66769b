"""Models of shapes on a device without memory or kernels."""

from __future__ import annotations

import ctypes
from typing import Any

from runtime.kernels_cu import chunk_attention, linear_stream, tree_mla
from runtime.kernels_cu.blank import BlankDevice
from runtime.reserve import placed

__all__ = ["BlankDevice", "placed", "without_driver"]


def without_driver(monkeypatch: Any) -> None:
    """Tensor maps are the driver's; here they are empty."""
    for family in (chunk_attention, linear_stream, tree_mla):
        monkeypatch.setattr(family, "tensor_map", lambda *_: (ctypes.c_char * 128)())
