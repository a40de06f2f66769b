"""Plans as bytes: one blob of fixed layout, the whole protocol between rank 0 and the others.

The same bytes go through shared memory to other ranks, through pinned memory to the device, and
nothing else does: no pickles, no method names. Offsets depend on the layout's capacities alone, so a
captured graph may read any field at its address; a header says how much of each field is live.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from runtime.types import Array, DraftPlan, StepPlan

MAGIC = 0x504C414E  # "PLAN"
DRAFT_MAGIC = 0x44524654  # "DRFT"
ALIGN = 16
_DTYPES = {
    "token": np.int32,
    "pos": np.int32,
    "slot": np.int32,
    "seq": np.int32,
    "ancestors": np.uint64,
    "ctx": np.int32,
    "row0": np.int32,
    "pages": np.int32,
    "moves": np.int32,
    "out_rows": np.int32,
    "seed": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "top_k": np.int32,
    "logprobs": np.int32,
    "adjust_seq": np.int32,
    "adjust_seq_by": np.float32,
    "adjust_row": np.int32,
    "adjust_row_by": np.float32,
    "mask_rows": np.int32,
    "masks": np.uint32,
    **dict.fromkeys(("root", "tap_rows", "tap_pos", "tap_slot"), np.int32),
}
STEP_FIELDS = tuple(f.name for f in fields(StepPlan) if f.name != "bucket")
DRAFT_FIELDS = tuple(f.name for f in fields(DraftPlan))


class PlanOverflow(ValueError):
    """A plan holds more of something than the layout has room for."""


class Layout(Hashable, Protocol):
    """Capacities of a blob of one kind."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its fields, in the order of the header and of the blob."""

    def capacity(self, name: str) -> tuple[int, int]:
        """(rows, columns) a field can hold; columns 0: the field is one-dimensional."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a field lies in a blob: byte offset, header word of its rows (its columns follow), capacities, what an element is."""

    at: int
    header: int
    rows: int
    columns: int
    dtype: np.dtype[Any]

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Capacities of a step plan's blob; offsets follow from them."""

    max_rows: int  # M
    max_seqs: int  # B
    max_pages: int  # P, pages of one sequence
    max_words: int  # W, 64-bit ancestor words
    max_moves: int
    max_adjust: int  # entries of each adjustment table
    mask_words: int = 1  # 32-bit words of a token mask, ceil(V / 32)

    @property
    def names(self) -> tuple[str, ...]:
        return STEP_FIELDS

    def capacity(self, name: str) -> tuple[int, int]:
        """(rows, columns) a field can hold; columns 0: the field is one-dimensional."""
        per_row = {"token", "pos", "slot", "seq", "out_rows", "mask_rows"}
        if name in per_row:
            return self.max_rows, 0
        two_columns = {
            "moves": self.max_moves,
            **dict.fromkeys(("adjust_seq", "adjust_seq_by", "adjust_row", "adjust_row_by"), self.max_adjust),
        }
        if name in two_columns:
            return two_columns[name], 2
        if name == "ancestors":
            return self.max_rows, self.max_words
        if name == "masks":
            return self.max_rows, self.mask_words
        if name == "pages":
            return self.max_seqs, self.max_pages
        return self.max_seqs, 0

    def offsets(self) -> tuple[dict[str, int], int]:
        """Byte offset of every field, and the size of the whole blob."""
        found, size = places(self)
        return {name: place.at for name, place in found.items()}, size

    @property
    def nbytes(self) -> int:
        return places(self)[1]


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Capacities of a draft plan's blob."""

    max_streams: int  # B
    max_pages: int  # P
    max_taps: int  # n

    @property
    def names(self) -> tuple[str, ...]:
        return DRAFT_FIELDS

    def capacity(self, name: str) -> tuple[int, int]:
        """As `PlanLayout.capacity`."""
        if name.startswith("tap_"):
            return self.max_taps, 0
        return self.max_streams, self.max_pages if name == "pages" else 0

    @property
    def nbytes(self) -> int:
        return places(self)[1]


@cache
def places(layout: Layout) -> tuple[Mapping[str, Place], int]:
    """Where every field of a blob lies, and the size of the whole blob. Not to be changed: it is every caller's."""
    at, found = _aligned(4 * _header_words(layout)), dict[str, Place]()
    for i, name in enumerate(layout.names):
        rows, columns = layout.capacity(name)
        found[name] = Place(at, 2 + 2 * i, rows, columns, np.dtype(_DTYPES[name]))
        at = _aligned(at + rows * max(columns, 1) * found[name].item_bytes)
    return found, at


def _header_words(layout: Layout) -> int:
    """Magic, bucket, then (rows, columns) of every field."""
    return 2 + 2 * len(layout.names)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def pack_plan(plan: StepPlan, layout: PlanLayout, into: Array) -> None:
    """Writes a plan's live parts into a blob, into [layout.nbytes] u8. Raises PlanOverflow naming the field and both sizes."""
    Packer(layout, into).pack(plan)


def pack_draft(plan: DraftPlan, layout: DraftLayout, into: Array) -> None:
    """The same of a draft plan."""
    Packer(layout, into).pack(plan)


class Packer:
    """Writes plans of one kind into one blob, one after the other: what is there already, the very array of the plan before, stays.

    Plans are never changed once made, so an array that comes again holds what it held. Of a step of plain decoding that leaves 4 of
    22 fields to be written.
    """

    def __init__(self, layout: Layout, into: Array) -> None:
        self._what, self._magic = ("step plan", MAGIC) if layout.names == STEP_FIELDS else ("draft plan", DRAFT_MAGIC)
        self._room = memoryview(into)  # type: ignore[arg-type]  # bytes into bytes: a third of the time of views
        self._header = self._room[: 4 * _header_words(layout)].cast("i")
        self._places = tuple(places(layout)[0].items())
        self._values = attrgetter(*layout.names)
        self._held: list[Array | None] = [None] * len(self._places)

    def pack(self, plan: StepPlan | DraftPlan) -> None:
        """Raises PlanOverflow naming the field and both sizes; the blob is then no plan."""
        room, header, held = self._room, self._header, self._held
        header[0], header[1] = 0, getattr(plan, "bucket", 0)
        for i, value in enumerate(self._values(plan)):
            if value is held[i]:
                continue
            name, place = self._places[i]
            shape = value.shape
            live = shape[1] if len(shape) == 2 else 0
            if shape[0] > place.rows or live > place.columns:
                most = f"[{place.rows}{f', {place.columns}' if place.columns else ''}]"
                raise PlanOverflow(f"{self._what}: {name} is {list(shape)}, the layout holds {most}")
            if value.size:
                data = (value if value.dtype == place.dtype else value.astype(place.dtype)).tobytes()
                room[place.at : place.at + len(data)] = data
            header[place.header], header[place.header + 1] = shape[0], live
            held[i] = value
        header[0] = self._magic


def unpack_plan(blob: Array, layout: PlanLayout) -> StepPlan:
    """The plan in a blob, as views of it: valid until the blob is written again. Raises ValueError if it is none."""
    bucket, found = _unpack("step plan", MAGIC, blob, layout)
    return StepPlan(bucket=bucket, **found)


def unpack_draft(blob: Array, layout: DraftLayout) -> DraftPlan:
    """The same of a draft plan."""
    return DraftPlan(**_unpack("draft plan", DRAFT_MAGIC, blob, layout)[1])


def header_part(blob: Array, layout: Layout) -> Array:
    """The blob's header, u8: what `live_parts` are told from."""
    return blob[: 4 * _header_words(layout)]


def live_parts(blob: Array, layout: Layout) -> list[Array]:
    """The bytes of a blob that say something beside the header, a view for each field that is not empty; all else need not travel.

    Raises ValueError for a header that holds more of a field than there is room for.
    """
    header, found = header_part(blob, layout).view(np.int32), []
    for name, place in places(layout)[0].items():
        rows, columns = int(header[place.header]), int(header[place.header + 1])
        if not (0 <= rows <= place.rows and 0 <= columns <= place.columns):
            raise ValueError(f"{name} of a plan is [{rows}, {columns}], the layout holds [{place.rows}, {place.columns}]")
        nbytes = rows * (columns if place.columns else 1) * place.item_bytes
        if nbytes:
            found.append(blob[place.at : place.at + nbytes])
    return found


def _unpack(what: str, magic: int, blob: Array, layout: Layout) -> tuple[int, dict[str, Any]]:
    places_of, size = places(layout)
    if blob.nbytes < size:
        raise ValueError(f"{what}: the blob has {blob.nbytes} bytes, the layout needs {size}")
    header = blob[: 4 * _header_words(layout)].view(np.int32)
    if header[0] != magic:
        raise ValueError(f"{what}: the blob begins with {int(header[0]):#x}, not {magic:#x}")
    found: dict[str, Any] = {}
    for name, place in places_of.items():
        rows, columns = int(header[place.header]), int(header[place.header + 1])
        shape = (rows, columns) if place.columns > 0 else (rows,)
        count = int(np.prod(shape)) * place.item_bytes
        found[name] = blob[place.at : place.at + count].view(place.dtype).reshape(shape)
    return int(header[1]), found
