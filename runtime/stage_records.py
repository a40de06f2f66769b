"""What stages say to each other about plans: the plan's bytes without its empty room, and results of fixed layout."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from runtime.plan import Layout, header_part, live_parts
from runtime.stage_link import Link, StageLost
from runtime.types import Array, DraftLogits, StepResult

# Kinds of records, beside those of `runtime.ring` and `runtime.stage_hello`.
NEXT, READY, RESULT, DRAFTED, CAPTURED = 16, 17, 18, 19, 20

_RESULT = struct.Struct("<IIdd")  # rows, alternatives, step_us, experts
_COLUMNS = (("target", np.int32, False), ("logp", np.float32, False), ("finite", np.bool_, False))
_ALTERNATIVES = (("top_ids", np.int32, True), ("top_logp", np.float32, True))
_DRAFTED = struct.Struct("<III")  # streams, depth, choices


def send_plan(link: Link, kind: int, blob: Array, layout: Layout) -> None:
    """The live parts of a packed plan."""
    link.send(kind, header_part(blob, layout), *live_parts(blob, layout))


def read_plan(link: Link, nbytes: int, blob: Array, layout: Layout) -> None:
    """Puts a plan that `send_plan` sent where its fields belong in a blob. Raises StageLost if its length is not what its header says."""
    header = header_part(blob, layout)
    link.read(header)
    try:
        parts = live_parts(blob, layout)
    except ValueError as error:
        raise StageLost(f"{link.name} sent a plan that does not fit: {error}") from None
    due = len(header) + sum(len(part) for part in parts)
    if due != nbytes:
        raise StageLost(f"{link.name} sent a plan of {nbytes} bytes whose header says {due}")
    for part in parts:
        link.read(part)


def send_result(link: Link, result: StepResult) -> None:
    """What a stage says of a step; one before the last has no rows."""
    columns = [np.ascontiguousarray(getattr(result, name), kind) for name, kind, _ in (*_COLUMNS, *_ALTERNATIVES)]
    link.send(RESULT, _RESULT.pack(*result.top_ids.shape, result.step_us, result.experts), *columns)


def receive_result(link: Link) -> StepResult:
    nbytes = link.expect(RESULT)
    head = np.empty(_RESULT.size, np.uint8)
    link.read(head)
    rows, wanted, step_us, experts = _RESULT.unpack(head.tobytes())
    _check_length(link, nbytes, _RESULT.size + rows * (9 + 8 * wanted))
    found: dict[str, Any] = {}
    for name, kind, wide in (*_COLUMNS, *_ALTERNATIVES):
        found[name] = np.empty((rows, wanted) if wide else rows, kind)
        link.read(found[name])
    return StepResult(**found, step_us=step_us, experts=experts)


def send_drafted(link: Link, drafted: DraftLogits) -> None:
    link.send(DRAFTED, _DRAFTED.pack(*drafted.ids.shape), np.ascontiguousarray(drafted.ids), np.ascontiguousarray(drafted.logp))


def receive_drafted(link: Link) -> DraftLogits:
    nbytes = link.expect(DRAFTED)
    head = np.empty(_DRAFTED.size, np.uint8)
    link.read(head)
    shape = _DRAFTED.unpack(head.tobytes())
    _check_length(link, nbytes, _DRAFTED.size + 8 * math.prod(shape))
    ids, logp = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for array in (ids, logp):
        link.read(array)
    return DraftLogits(ids, logp)


def _check_length(link: Link, nbytes: int, due: int) -> None:
    if nbytes != due:
        raise StageLost(f"{link.name} sent a record of {nbytes} bytes whose head says {due}")
