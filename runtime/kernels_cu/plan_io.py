"""The ends of a step's graph: the calls of plan_io.cu.

A blob is what `runtime.plan` packs: a header of (rows, columns) for every field, then the fields at fixed offsets. Where each
field goes in the device is a `Field`; the blob's sizes come from its own header, so one call serves every step of a bucket.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.kernels_cu._call import Call, blocks, i32, ptr

SOURCE = "plan_io.cu"
ENTRIES = ("plan_read", "block_rows", "publish")
THREADS, PUBLISH_THREADS = 256, 512  # kThreads, kPublish of plan_io.cu
MOST_FIELDS, MOST_RESULTS, MOST_UNIONS = 24, 6, 8  # kFields, kResults, kUnions
MOST_BLOCKS = 32  # 8,192 vectors of 16 bytes in flight: twice what 55 GB/s need at 1.2 us


class _Field(ctypes.Structure):
    """`Field` of plan_io.cu."""

    _fields_ = [
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("from_", "header", "room", "width", "item")),
        ("fill", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("fills", "pads")),
    ]  # fmt: skip


class ReadParams(ctypes.Structure):
    """`ReadParams` of plan_io.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("blob", "sequence", "live")), ("count", ctypes.c_int), ("field", _Field * MOST_FIELDS),
    ]  # fmt: skip


class _Result(ctypes.Structure):
    """`Result` of plan_io.cu."""

    _fields_ = [("from_", ctypes.c_void_p), ("to", ctypes.c_void_p), ("row_bytes", ctypes.c_int), ("asked", ctypes.c_int)]


class _Union(ctypes.Structure):
    """`Union` of plan_io.cu."""

    _fields_ = [("chunks", ctypes.c_void_p), ("total", ctypes.c_void_p)]


class PublishParams(ctypes.Structure):
    """`PublishParams` of plan_io.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("live", "number", "logprobs", "live_seqs", "sequence", "experts")),
        ("count", ctypes.c_int), ("unions", ctypes.c_int), ("result", _Result * MOST_RESULTS), ("hit", _Union * MOST_UNIONS),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One field's way from the blob to device memory.

    at: byte offset in the blob; header: word of the header that holds its rows, columns follow; to: device address of
    [rows, columns] elements of `item_bytes` (columns 1 for a one-dimensional field), with room for whole 16-byte vectors.
    fill: what rows beyond the live ones become, as a 32-bit word; None: they keep what they held. pads: columns of a live row
    beyond the plan's become zero.
    """

    name: str
    at: int
    header: int
    to: int
    rows: int
    columns: int
    item_bytes: int
    fill: int | None = None
    pads: bool = False

    def check(self) -> None:
        """Raises ValueError naming the number that the kernel cannot take."""
        if self.at % 16 or self.to % 16:
            raise ValueError(f"plan_read: {self.name} goes from offset {self.at} to {self.to:#x}; both must be multiples of 16")
        if self.item_bytes not in (4, 8) or min(self.rows, self.columns) < 1:
            raise ValueError(
                f"plan_read: {self.name} is [{self.rows}, {self.columns}] of {self.item_bytes} bytes; 4 or 8, and no empty room"
            )
        if self.fill is not None and not -(1 << 31) <= self.fill < 1 << 31:
            raise ValueError(f"plan_read: {self.name} is to be filled with {self.fill}, no 32-bit integer")

    @property
    def words(self) -> int:
        """32-bit words of a row in the device."""
        return self.columns * self.item_bytes // 4


@dataclass(frozen=True, slots=True)
class Result:
    """Rows that go back: from device address to mapped host memory, row_bytes each; asked: only if the plan wants alternatives."""

    at: int
    to: int
    row_bytes: int
    asked: bool = False


def read_blocks(fields: Sequence[Field]) -> int:
    """Blocks that give a bucket's row fields a thread a vector; more would only read the header more often."""
    words = sum(field.rows * field.words for field in fields if field.fill is not None or field.pads)
    return max(2, min(MOST_BLOCKS, blocks(words, 4 * THREADS)))


def plan_read(fields: Sequence[Field], *, blob: int, sequence: int, live: int) -> Call:
    """Reads the blob at device address `blob` of mapped host memory into the fields.

    live: [len(fields) + 1] i32, the rows of each field in order, then the launch's number, read from `sequence`.
    """
    if not 1 <= len(fields) <= MOST_FIELDS:
        raise ValueError(f"plan_read: {len(fields)} fields; 1 to {MOST_FIELDS}")
    if blob % 16:
        raise ValueError(f"plan_read: the blob lies at {blob:#x}, no multiple of 16")
    params = ReadParams(blob, sequence, live, len(fields))
    for i, field in enumerate(fields):
        field.check()
        filled = field.fill is not None
        params.field[i] = _Field(
            field.to,
            field.at,
            field.header,
            field.rows,
            field.words,
            field.item_bytes // 4,
            (field.fill or 0) & 0xFFFFFFFF,
            int(filled),
            int(field.pads),
        )
    return Call("plan_read", (read_blocks(fields), 1, 1), THREADS, 0, (params,))


def block_rows(
    streams: int,
    block: int,
    mask: int,
    last: int,
    *,
    root: int,
    pos: int,
    live: int,
    token: int,
    row_pos: int,
    seq: int,
    mask_rows: int,
    live_masks: int,
) -> Call:
    """token, row_pos, seq [B*T] and mask_rows [B*(T-1)] of root, pos [B]; live, live_masks [1]: streams and mask rows that count.

    streams is B, block T, mask the mask's token, last the greatest position. Rows of streams beyond *live get seq -1.
    """
    if streams < 1 or block < 2:
        raise ValueError(f"block_rows: B = {streams}, T = {block}; at least one stream of two rows")
    pointers = (ptr(root), ptr(pos), ptr(live), ptr(token), ptr(row_pos), ptr(seq), ptr(mask_rows), ptr(live_masks))
    numbers = (i32(streams), i32(block), i32(mask), i32(last))
    return Call("block_rows", (blocks(streams * block, THREADS), 1, 1), THREADS, 0, (*pointers, *numbers))


def publish(
    results: Sequence[Result],
    *,
    live: int,
    number: int,
    sequence: int,
    logprobs: int = 0,
    live_seqs: int = 0,
    unions: Sequence[tuple[int, int]] = (),
    experts: int = 0,
) -> Call:
    """Writes *live rows of every result to the host, then *number to `sequence` there.

    logprobs [B] with *live_seqs of them live: results marked `asked` go out only if one is above 0; 0: there are none such.
    unions: addresses of the work lists `chunks` [*total, 4] i32 and of their `total` [1] that moe_route.cu has left, a pair a layer;
    the distinct experts in them, summed, go to `experts` [1] u32 on the host.
    """
    if len(results) > MOST_RESULTS:
        raise ValueError(f"publish: {len(results)} results; at most {MOST_RESULTS}")
    if len(unions) > MOST_UNIONS:
        raise ValueError(f"publish: experts of {len(unions)} layers; at most {MOST_UNIONS}")
    params = PublishParams(live, number, logprobs, live_seqs, sequence, experts if unions else 0, len(results), len(unions))
    for i, (chunks, total) in enumerate(unions):
        params.hit[i] = _Union(chunks, total)
    for i, result in enumerate(results):
        if result.at % 16 or result.to % 16 or result.row_bytes < 1:
            raise ValueError(f"publish: {result}; addresses must be multiples of 16, rows not empty")
        params.result[i] = _Result(result.at, result.to, result.row_bytes, int(result.asked))
    return Call("publish", (1, 1, 1), PUBLISH_THREADS, 0, (params,))
