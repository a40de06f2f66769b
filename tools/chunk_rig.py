"""Long chunks on the GPU for tests and the benchmark: scratch arrays and the three launches over arrays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.kernels_cu import chunk_attention as family
from runtime.kernels_cu._build import build
from runtime.kernels_cu._launch import load
from runtime.kernels_cu.device import arch_of_device


class Chunks:
    """arrays: on the device, by the ops' names: q, absorbed, cache, w_uk, w_uv, pages, ctx, row0, seq, pos, rest, value. least: rows of
    a chunk that is taken. Scratch starts as NaN; plan, expand and attend are the launches."""

    def __init__(self, dims: family.Dims, arrays: Mapping[str, Any], least: int, scale: float, config: family.Config) -> None:
        import cupy as cp

        self.cp, self.arrays, arch = cp, dict(arrays), arch_of_device()
        blocks = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        sizes = family.list_bytes(dims.M, least, dims.room) | family.workspace_bytes(dims.heads, dims.room, blocks)
        self.room = {name: cp.full(size, 0xFF, cp.uint8) for name, size in sizes.items()}
        self.room["arrived"][...] = 0
        at = {name: a.data.ptr for name, a in (self.arrays | self.room).items()}
        sources = ((family.PLAN, {}), (family.EXPAND, {}), (family.ATTEND, config.defines()))
        entries = ("split_chunks", "chunk_expand", "chunk_attention")
        functions: dict[str, Any] = {}
        for (source, defines), entry in zip(sources, entries, strict=True):
            functions |= load(build(source, defines, arch).code, (entry,))
        rows, sequences = self.arrays["seq"].size, self.arrays["ctx"].size
        self.plan = family.plan_call(rows, sequences, least, dims.room, at).launch(functions)
        self.expand = family.expand_call(dims, blocks, at).launch(functions)
        self.attend = family.attend_call(dims, blocks, at, scale).launch(functions)
        cp.cuda.Device().synchronize()

    def run(self, stream: Any) -> None:
        """All three, to their end."""
        for launch in (self.plan, self.expand, self.attend):
            launch.run(stream.ptr)
        stream.synchronize()
        if self.room["arrived"].any():
            raise RuntimeError("chunk_attention left counters that are not zero: the next launch would add up too early")
