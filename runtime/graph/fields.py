"""A plan's fields in device memory: fixed addresses and capacities for each bucket, filled by the first node of its graph.

All buckets share the memory; a bucket sees the first rows of each field. Ancestor rows lie as far apart as the bucket's M needs
words, page tables as far as the layout's widest. Page tables keep earlier steps' entries beyond the live ones: tree_mla loads
whole tiles of keys, so an entry must name some page of the cache, and each that ever stood there does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.graph.driver import Driver, Mapped
from runtime.kernels_cu import plan_io
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.device import Runnable
from runtime.kernels_cu.recorder import Live
from runtime.plan import DraftLayout, Layout, Place, PlanLayout, places
from runtime.types import DraftPlan, StepPlan

# What marks a row as dead, or is read without asking whether it is live. block_attention takes a stream of position -1 as dead.
_STEP_FILLS = {"token": 0, "pos": 0, "slot": -1, "seq": -1, "ctx": 0, "row0": 0, "out_rows": -1, "logprobs": -1}
_DRAFT_FILLS = {"root": 0, "pos": -1, "tap_rows": -1, "tap_pos": 0, "tap_slot": -1}
_PER_ROW = frozenset({"token", "pos", "slot", "seq", "ancestors"})
_PER_OUT = frozenset({"out_rows", "mask_rows", "masks"})
_PER_SEQ = frozenset({"ctx", "row0", "pages", "seed", "temperature", "top_p", "min_p", "top_k", "logprobs"})
_DTYPES = {"ancestors": "u64", "seed": "u64", "masks": "u32"}
_FLOATS = frozenset({"temperature", "top_p", "min_p", "adjust_seq_by", "adjust_row_by"})


@dataclass(frozen=True, slots=True)
class View:
    """One bucket's fields: `plan` is a StepPlan or DraftPlan whose arrays are DeviceArrays; read: its first node."""

    plan: Any
    read: Runnable


class Fields:
    """Blob, launch number and device memory of one kind of plan."""

    def __init__(self, driver: Driver, layout: Layout) -> None:
        self.layout = layout
        self._driver = driver
        self._places, size = places(layout)
        self.names = layout.names
        self.blob: Mapped = driver.mapped(size)
        self._number: Mapped = driver.mapped(16)
        device = driver.device
        self._held = {name: device.alloc(_room(place)) for name, place in self._places.items()}
        self._counts = device.alloc(4 * (len(self.names) + 1))
        self._functions = device.functions(plan_io.SOURCE, {}, plan_io.ENTRIES)

    def set_number(self, number: int) -> None:
        """The number that the next launch will publish when it is done."""
        self._number.host[:4].view(np.uint32)[0] = number

    def count(self, name: str) -> int:
        """Address of a field's live rows."""
        return self._counts + 4 * self.names.index(name)

    @property
    def number(self) -> int:
        """Address of the launch's number on the device."""
        return self._counts + 4 * len(self.names)

    def free(self) -> None:
        """Gives the device memory back; no view may be used any more."""
        for address in (*self._held.values(), self._counts):
            self._driver.device.free(address)
        self._held = {}

    def prepare(self, call: Any) -> Runnable:
        return self._driver.device.prepare(call, self._functions)

    def view(self, kind: type, shapes: Mapping[str, tuple[int, ...]], fills: Mapping[str, int], **more: Any) -> View:
        """Fields as arrays of `shapes`, and the launch that fills them."""
        arrays, moved = {}, []
        for name, shape in shapes.items():
            place, columns = self._places[name], shape[1] if len(shape) > 1 else 1
            arrays[name] = DeviceArray(self._held[name], shape, _dtype(name))
            moved.append(
                plan_io.Field(
                    name,
                    place.at,
                    place.header,
                    self._held[name],
                    shape[0],
                    columns,
                    place.item_bytes,
                    fills.get(name),
                    name == "ancestors",
                )
            )
        call = plan_io.plan_read(moved, blob=self.blob.address, sequence=self._number.address, live=self._counts)
        return View(kind(**arrays, **more), self.prepare(call))


class StepFields(Fields):
    """A step plan's."""

    def __init__(self, driver: Driver, layout: PlanLayout) -> None:
        super().__init__(driver, layout)
        self._layout = layout

    def bucket(self, rows: int, out_rows: int) -> View:
        """M = rows; out_rows: room for rows whose next token is wanted."""
        seqs, shapes = min(rows, self._layout.max_seqs), dict[str, tuple[int, ...]]()
        for name in self.names:
            most, columns = self._layout.capacity(name)
            count = seqs if name in _PER_SEQ else out_rows if name in _PER_OUT else rows if name in _PER_ROW else most
            shapes[name] = (count, columns) if columns else (count,)
        shapes["ancestors"] = (rows, -(-rows // 64))
        return self.view(StepPlan, shapes, _STEP_FILLS, bucket=rows)

    @property
    def live(self) -> Live:
        return Live(*(self.count(name) for name in ("out_rows", "moves", "adjust_seq", "adjust_row", "mask_rows")))


class DraftFields(Fields):
    """A draft plan's."""

    def __init__(self, driver: Driver, layout: DraftLayout) -> None:
        super().__init__(driver, layout)
        self._layout = layout

    def bucket(self, streams: int, taps: int) -> View:
        """B = streams, n = taps; a graph that reads only one of them passes the least room, 1, for the other."""
        shapes = {name: (taps,) if name.startswith("tap_") else (streams,) for name in self.names}
        return self.view(DraftPlan, {**shapes, "pages": (streams, self._layout.max_pages)}, _DRAFT_FILLS)


def _dtype(name: str) -> str:
    return "f32" if name in _FLOATS else _DTYPES.get(name, "i32")


def _room(place: Place) -> int:
    """Bytes of a field at its capacity, in whole vectors."""
    return -(-place.rows * max(place.columns, 1) * place.item_bytes // 16) * 16
