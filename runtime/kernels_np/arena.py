"""Weights side by side in large blocks.

NumPy asks the system for huge pages from 4 MB on, and most matrices of a small model are below. A step whose weights exceed the
caches reads them from memory, where pages of 4 KB cost it time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from runtime.types import Array

BLOCK_BYTES = 32 << 20


class Arena:
    """Hands out arrays from blocks of BLOCK_BYTES; larger ones get memory of their own."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of undefined contents, beginning at a multiple of 64 bytes of its block."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > BLOCK_BYTES:
            return np.empty(shape, dtype)
        room = -(-nbytes // 64) * 64
        if room > self._block.size:
            self._block = np.empty(BLOCK_BYTES, np.uint8)
        part, self._block = self._block[:nbytes], self._block[room:]
        found: Array = part.view(dtype).reshape(shape)
        return found
