"""Long chunks of prompts whose keys are expanded for every head: from how many rows it pays, and what room it takes."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 128  # keys that a sequence's room is rounded up to
MOST_BYTES = 4 << 30  # of expanded keys and values: 131,072 keys of 64 heads, 1,048,576 of 8


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A step of M rows over a latent cache, on one rank. heads: of this rank; latent, rope, nope, value: numbers of a key or head;
    longest: keys of the longest sequence; page_size: keys of a page."""

    rows: int
    heads: int
    latent: int
    rope: int
    nope: int
    value: int
    longest: int
    page_size: int

    @property
    def least(self) -> int:
        """Rows of a chunk from which the un-absorbed form takes fewer flops, whatever the heads and keys.

        A key costs 2 L (N + U) flops a head to expand, and saves each row (L + R) + L - (N + R) - U products: 171 rows for Kimi K2.6.
        """
        saved = 2 * self.latent - self.nope - self.value
        if saved <= 0:
            raise ValueError(f"latent {self.latent}, nope {self.nope}, value {self.value}: the absorbed form never takes more flops")
        return -(-self.latent * (self.nope + self.value) // saved)

    @property
    def key_bytes(self) -> int:
        """Of a key and its value in bf16, expanded for all heads: 32 KB at 64 heads of 128 + 128."""
        return 2 * self.heads * (self.nope + self.value)

    @property
    def room(self) -> int:
        """Keys that there is to be room for: the longest sequence's, in whole tiles, or MOST_BYTES of them."""
        return min(-(-self.longest // TILE), MOST_BYTES // (TILE * self.key_bytes)) * TILE
