"""The step plan as bytes: one blob of fixed layout, the whole protocol between rank 0 and the others.

The same bytes go through shared memory to other ranks, through pinned memory to the device, and
nothing else does: no pickles, no method names. Offsets depend on the layout's capacities alone, so a
captured graph may read any field at its address; a header says how much of each field is live.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from runtime.types import Array, StepPlan

MAGIC = 0x504C414E  # "PLAN"
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
}
_NAMES = tuple(f.name for f in fields(StepPlan) if f.name != "bucket")
_HEADER_WORDS = 2 + 2 * len(_NAMES)  # magic, bucket, then (rows, columns) of every field


class PlanOverflow(ValueError):
    """A plan holds more of something than the layout has room for."""


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Capacities of a blob; offsets follow from them."""

    max_rows: int  # M
    max_seqs: int  # B
    max_pages: int  # P, pages of one sequence
    max_words: int  # W, 64-bit ancestor words
    max_moves: int
    max_adjust: int  # entries of each adjustment table
    mask_words: int = 1  # 32-bit words of a token mask, ceil(V / 32)

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
        at, found = _aligned(4 * _HEADER_WORDS), {}
        for name in _NAMES:
            found[name] = at
            rows, columns = self.capacity(name)
            at = _aligned(at + rows * max(columns, 1) * np.dtype(_DTYPES[name]).itemsize)
        return found, at

    @property
    def nbytes(self) -> int:
        return self.offsets()[1]


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def pack_plan(plan: StepPlan, layout: PlanLayout, into: Array) -> None:
    """Writes a plan's live parts into a blob, into [layout.nbytes] u8. Raises PlanOverflow naming the field and both sizes."""
    offsets, _ = layout.offsets()
    header = into[: 4 * _HEADER_WORDS].view(np.int32)
    header[:2] = MAGIC, plan.bucket
    for i, name in enumerate(_NAMES):
        value: Array = getattr(plan, name)
        rows, columns = layout.capacity(name)
        live = value.shape[1] if value.ndim == 2 else 0
        if value.shape[0] > rows or live > columns:
            raise PlanOverflow(f"step plan: {name} is {list(value.shape)}, the layout holds [{rows}{f', {columns}' if columns else ''}]")
        header[2 + 2 * i : 4 + 2 * i] = value.shape[0], live
        data = np.ascontiguousarray(value, _DTYPES[name]).reshape(-1).view(np.uint8)
        into[offsets[name] : offsets[name] + data.size] = data


def unpack_plan(blob: Array, layout: PlanLayout) -> StepPlan:
    """The plan in a blob, as views of it: valid until the blob is written again. Raises ValueError if it is none."""
    offsets, size = layout.offsets()
    if blob.nbytes < size:
        raise ValueError(f"step plan: the blob has {blob.nbytes} bytes, the layout needs {size}")
    header = blob[: 4 * _HEADER_WORDS].view(np.int32)
    if header[0] != MAGIC:
        raise ValueError(f"step plan: the blob begins with {int(header[0]):#x}, not {MAGIC:#x}")
    found: dict[str, Array] = {}
    for i, name in enumerate(_NAMES):
        rows, columns = int(header[2 + 2 * i]), int(header[3 + 2 * i])
        dtype = np.dtype(_DTYPES[name])
        two_dimensional = layout.capacity(name)[1] > 0
        shape = (rows, columns) if two_dimensional else (rows,)
        count = int(np.prod(shape)) * dtype.itemsize
        found[name] = blob[offsets[name] : offsets[name] + count].view(dtype).reshape(shape)
    return StepPlan(bucket=int(header[1]), **found)
