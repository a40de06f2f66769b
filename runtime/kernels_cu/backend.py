"""The CUDA reading of the vocabulary: every op becomes prepared launches, which nothing runs until its caller does.

GPU-unverified: run on the CPU shim against `kernels_np`, never yet run on a GPU.
"""

from __future__ import annotations

from runtime.kernels_cu.recorder import Recorder


class CudaBackend(Recorder):
    """Ops as methods that record; memory, `recording`, `seal` and `recorded` are `Recorder`'s."""

    name = "cuda"
