"""Sampling where ranks hold a share of the vocabulary each: the launch of sample_ranks.cu.

Run on the CPU shim by two to four processes, on two H200 (tools/results/draw_ranks_h200x2.jsonl), compiled for every architecture.

Each rank owns a region that the others write into, and a state of its own; both start as zeros. All ranks must make the same
launches in the same order, over the same plan, with the same config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.hw import Hardware
from runtime.kernels_cu import sample
from runtime.kernels_cu._call import Call
from runtime.kernels_cu.all_reduce import MAX_WORLD, Ranks, seat_of

SOURCE = "sample_ranks.cu"
ENTRIES = ("sample_ranks",)
ROOM_BYTES = 33_336  # sizeof(Shared) of sample_ranks.cu but for its WORLD-fold arrays; the shim's test holds them to each other
MOST_TOP = 28  # kWords - kHeader
PACKETS = 512  # kPackets of prim/team.cuh: of a place, 16 bytes each
_WORDS = 32  # kWords
EXCHANGE_US = 2.0  # a flag over NVLink and a poll; an estimate until a record exists


@dataclass(frozen=True, slots=True)
class Config:
    """threads of a block, blocks: the largest grid, all of whose blocks are resident: at most the number of multiprocessors."""

    world: int
    threads: int = 512
    blocks: int = 128

    def fits(self, share: int, top: int) -> bool:
        """Whether ranks can draw from shares of that many tokens, with `top` alternatives."""
        whole = self.world * share
        if share % 4 or not 0 < whole <= sample.MOST_IDS or top > min(MOST_TOP, whole):
            return False
        return self.smem_bytes(share) <= sample.MAX_SMEM_BYTES

    def check(self, share: int, top: int) -> None:
        """Raises ValueError with the broken rule."""
        if not 2 <= self.world <= MAX_WORLD or self.blocks < 1:
            raise ValueError(f"{self}: 2 to {MAX_WORLD} ranks, at least one block")
        if self.threads % 32 or not 32 <= self.threads <= PACKETS or 2048 % self.threads:
            raise ValueError(f"{self}: {self.threads} threads; whole warps that divide 2048 bins, at most {PACKETS}")
        if not self.fits(share, top):
            raise ValueError(f"{self}: shares of {share} tokens with {top} alternatives; see sample_ranks.cu for the limits")

    def smem_bytes(self, share: int) -> int:
        """Bins and list, what is told and heard, then two bit maps of the share."""
        return ROOM_BYTES + 8 * self.world * (_WORDS + 2) + 2 * 4 * -(-share // 32)

    def region_bytes(self) -> int:
        """Of one rank: packets of 16 bytes by parity, sender and block."""
        return 2 * self.world * self.blocks * PACKETS * 16

    def state_bytes(self) -> int:
        return 4 * (self.blocks + 1)

    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads, "WORLD": self.world, "BLOCKS": self.blocks}


def default_config(world: int, sms: int) -> Config:
    return Config(world, blocks=min(128, sms))


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank draws with: a configuration, the same on all ranks, and where it finds them."""

    config: Config
    ranks: Ranks


def exchanges(*, hot: bool, top_k: bool, top_p: bool) -> int:
    """Of one row, where lists have room."""
    return 1 + hot * (1 + 2 * top_k + 3 * top_p)


def predict_us(dims: sample.Dims, passes: int, rounds: int, hw: Hardware, sms: int = 132) -> float:
    """One row's passes over a share of dims.V and its exchanges, as often as rows queue at a multiprocessor."""
    alone = sample.predict_us(sample.Dims(1, dims.V, dims.K), passes, hw, sms)
    return -(-dims.I // sms) * (alone + rounds * EXCHANGE_US)


def call(rows: int, share: int, top: int, config: Config, at: Mapping[str, int], ranks: Ranks, words: int) -> Call:
    """One launch for `rows` output rows. at: addresses by sample.POINTERS, logits [rows, share]; words: of a whole vocabulary's mask."""
    config.check(share, top)
    params = sample.Params(*(at[name] for name in sample.POINTERS), share, top, words)
    grid = (min(rows, config.blocks), 1, 1)
    return Call("sample_ranks", grid, config.threads, config.smem_bytes(share), (params, seat_of("sample_ranks", ranks, config.world)))
