"""Where a weight's numbers come from, before a backend has them: rows and columns of files, or a hash.

A model names sources and stacks them; a backend that computes on the host reads them (`read`, `pack`), one that computes on a
device fetches the windows itself, many at once, straight to where they shall lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from runtime.types import Array
from runtime.w4 import GROUP, W4, check_dims

T = TypeVar("T")
ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "u8": 1}


class _Window:
    """Rows [rows) and columns [cols) of a row-major matrix of `width` numbers a row."""

    __slots__ = ()
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    def part(self, first: int, last: int) -> Self:
        """Its rows from `first` to before `last`."""
        if (first, last) == (0, self.rows[1] - self.rows[0]):
            return self  # as for most experts: replacing takes 10 us
        return replace(self, rows=(self.rows[0] + first, self.rows[0] + last))  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class FileWindow(_Window):
    """A window of a matrix that lies in a file from byte `start` on."""

    path: Path
    start: int
    dtype: str
    width: int
    rows: tuple[int, int]
    cols: tuple[int, int]


@dataclass(frozen=True, slots=True)
class HashWindow(_Window):
    """A window of a matrix that is computed from `key` and each number's index (`runtime.hashed`). spread 0: all are `mean`."""

    key: int
    mean: float
    spread: float
    dtype: str
    width: int
    rows: tuple[int, int]
    cols: tuple[int, int]


Window = FileWindow | HashWindow


@dataclass(frozen=True, slots=True)
class Source:
    """A weight [n, k] or [k] of one dtype: windows of k columns, one below the other. readers: each window's numbers on the host."""

    shape: tuple[int, ...]
    dtype: str
    windows: tuple[Window, ...]
    readers: tuple[Callable[[], Array], ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]

    def read(self) -> Array:
        """All of it on the host, in the stored dtype."""
        parts = [np.asarray(read()) for read in self.readers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def stack(*sources: Source) -> Source:
    """One matrix of the rows of several. Raises ValueError where widths or dtypes differ."""
    kinds = {(s.shape[1:], s.dtype, len(s.shape)) for s in sources}
    if len(kinds) != 1 or len(sources[0].shape) != 2:
        given = ", ".join(f"{s.dtype} {list(s.shape)}" for s in sources)
        raise ValueError(f"stack: sources are {given}; want matrices of one width and dtype")
    rows = sum(s.shape[0] for s in sources)
    windows = tuple(w for s in sources for w in s.windows)
    return Source((rows, sources[0].shape[1]), sources[0].dtype, windows, tuple(r for s in sources for r in s.readers))


def cut_stacked(rows: slice, sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Which rows of which matrices lie in `rows` of them all stacked, where they have `sizes` rows each: (matrix, its rows)."""
    start = 0
    for i, size in enumerate(sizes):
        first, last = max(rows.start - start, 0), min(rows.stop - start, size)
        if first < last:
            yield i, slice(first, last)
        start += size


def one_late(started: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each makes, called when the next has been started: the host's work, while a device fetches what that one named."""
    before: Callable[[], T] | None = None
    for finish in started:
        if before is not None:
            yield before()
        before = finish
    if before is not None:
        yield before()


@dataclass(frozen=True, slots=True)
class Triple:
    """An INT4 matrix [n, k] as compressed-tensors stores it: words i32 [n, k/8], lowest nibble first, and scale bf16 [n, k/32]."""

    words: Source
    scale: Source

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * 8


@dataclass(frozen=True, slots=True)
class W4Source:
    """INT4 experts: for each the triples whose rows are one matrix [N, K]; two (gate, up) are woven in eights when packed.

    pack: the packed weights made on the host.
    """

    experts: tuple[tuple[Triple, ...], ...]
    pack: Callable[[], W4]

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape for t in parts) for parts in self.experts}
        if len(shapes) != 1 or len({t.shape for parts in self.experts for t in parts}) != 1 or len(self.experts[0]) not in (1, 2):
            raise ValueError(f"INT4 experts of {sorted(map(str, shapes))}; want one or two triples each, all of one shape")
        for t in self.experts[0]:
            fitting = (t.shape[0], t.shape[1] // GROUP)
            if t.scale.shape != fitting:
                raise ValueError(f"INT4 words {list(t.words.shape)} beside scales {list(t.scale.shape)}; want {list(fitting)}")
        check_dims(self.E, self.N, self.K, self.interleaved)

    @property
    def E(self) -> int:
        return len(self.experts)

    @property
    def N(self) -> int:
        return sum(t.shape[0] for t in self.experts[0])

    @property
    def K(self) -> int:
        return self.experts[0][0].shape[1]

    @property
    def interleaved(self) -> bool:
        return len(self.experts[0]) == 2
