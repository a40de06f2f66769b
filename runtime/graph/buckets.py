"""Sizes that steps are launched with, and how many of their rows may want a token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WIDE = 128  # rows from which a chunk of a prompt is likely, whose rows want no token but the last


def fit_sizes(most: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Rising sizes for 1 to `most` rows, `most` the last of them; None: the default ones.

    Raises ValueError for sizes that are no positive integers, or above `most`.
    """
    chosen = DEFAULT_SIZES if sizes is None else tuple(sizes)
    for size in chosen:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"cudagraph_capture_sizes: {size!r} is not a positive integer")
        if sizes is not None and size > most:
            raise ValueError(f"cudagraph_capture_sizes: {size} is above max_num_batched_tokens {most}; a step never has so many rows")
    return (*sorted({size for size in chosen if size < most}), most)


def size_for(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds `count`. Raises ValueError if none does."""
    at = bisect_left(sizes, count)
    if at == len(sizes):
        raise ValueError(f"{count} rows; the largest size is {sizes[-1]}")
    return sizes[at]


def out_sizes(rows: int, most_seqs: int) -> tuple[int, ...]:
    """How many output rows a bucket's graphs have room for, rising; the last holds every row.

    Each costs its share of the head and of sampling whether live or not (1,024 rows of a vocabulary of 163,840: 2.4 TFLOP and
    671 MB of logits), so wide buckets get a variant for prompts, in which a sequence wants one token.
    """
    return (most_seqs, rows) if rows >= WIDE and most_seqs < rows else (rows,)
