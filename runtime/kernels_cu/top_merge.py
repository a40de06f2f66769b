"""A vocabulary cut over ranks, its likeliest tokens and its rows of logits: the calls of top_merge.cu.

GPU-unverified: run on the CPU shim, compiled for every architecture, never yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.kernels_cu._call import Call, blocks, i32, ptr, vectors

SOURCE = "top_merge.cu"
ENTRIES = ("top_pack", "top_merge", "side_by_side")
MOST = 1024  # world x K; two words of shared memory each


@dataclass(frozen=True, slots=True)
class Config:
    world: int
    threads: int = 128

    def fits(self, share: int, top: int) -> bool:
        """Whether K = top of `share` tokens a rank can be merged."""
        return 1 <= top <= share and self.world * top <= MOST

    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads, "WORLD": self.world, "MOST": MOST}

    def part_bytes(self, m: int, top: int) -> int:
        """What a rank tells of m rows."""
        return 8 * m * (top + 1)


def top_pack(config: Config, m: int, share: int, top: int, first: int, *, logits: int, ids: int, logp: int, live: int, out: int) -> Call:
    """out [M, K + 1] (u32, u32): what top_logprobs made of this rank's logits [M, share], whose first token is `first`."""
    arguments = (ptr(logits), ptr(ids), ptr(logp), ptr(live), ptr(out), i32(share), i32(top), i32(first))
    return Call("top_pack", (m, 1, 1), config.threads, 0, arguments)


def top_merge(config: Config, m: int, top: int, *, parts: int, live: int, ids: int, logp: int) -> Call:
    """ids, logp [M, K] of all ranks' parts [world, M, K + 1], for the rows below *live."""
    if config.world * top > MOST:
        raise ValueError(f"top_merge: {config.world} ranks' {top} tokens; at most {MOST} together")
    return Call("top_merge", (m, 1, 1), config.threads, 0, (ptr(parts), ptr(live), ptr(ids), ptr(logp), i32(m), i32(top)))


def side_by_side(config: Config, m: int, row_bytes: int, *, parts: int, out: int) -> Call:
    """out [M, world, row_bytes] = parts [world, M, row_bytes]; rows are multiples of 16 bytes."""
    row = vectors("side_by_side", "a rank's row", row_bytes, 1)
    return Call("side_by_side", (blocks(row, config.threads), m, config.world), config.threads, 0, (ptr(parts), ptr(out), i32(row)))
