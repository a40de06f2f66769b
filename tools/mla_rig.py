"""Attention on the GPU for tests and the benchmark: one batch, its scratch arrays, its launches."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.kernels_cu.device import arch_of_device
from runtime.kernels_cu.tree_mla import build_kernels, layer_launch, merge_launch, merges_later, plan_launch, workspace_bytes
from runtime.kernels_cu.tree_mla_config import Config

PLAN = ("ctx", "row0", "seq", "ancestors", "pages")


def as_float(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (u16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Attention:
    """Uploads, launches, results. batch: arrays by the op's names and `dims`; scratch and outputs start as NaN."""

    def __init__(self, batch: Any, config: Config, scale: float) -> None:
        import cupy as cp

        self.cp, arch = cp, arch_of_device()
        d = batch.dims
        sms = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        self.stream = cp.cuda.Stream(non_blocking=True)
        room = {name: cp.full(size, 0xFF, cp.uint8) for name, size in workspace_bytes(d, config, sms).items()}
        room["arrived"][...] = 0
        room |= {name: cp.asarray(getattr(batch, name)) for name in PLAN}
        room |= {name: cp.asarray(getattr(batch, name).view(np.uint16)) for name in ("q", "cache")}
        self.out = room["out"] = cp.full((d.M, d.heads, 512), 0xFFFF, cp.uint16)
        self.room = room
        kernels = build_kernels(d, config, arch, sms)
        at = {name: a.data.ptr for name, a in room.items()}
        self.launches = [plan_launch(kernels, at), layer_launch(kernels, at, scale, slots=len(batch.cache), behind_plan=True)]
        if merges_later(config):
            self.launches.append(merge_launch(kernels, at, scale))
        cp.cuda.Device().synchronize()

    def enqueue(self) -> None:
        for launch in self.launches:
            launch.run(self.stream.ptr)

    def result(self) -> np.ndarray:
        self.stream.synchronize()
        if self.room["arrived"].any():
            raise RuntimeError("tree_mla left counters that are not zero: the next launch would not wait")
        return as_float(self.cp.asnumpy(self.out))

    def run(self) -> np.ndarray:
        self.enqueue()
        return self.result()
