"""What is launched for a step and for a draft: recorded once for each size, captured as a graph, replayed by number.

step      plan_read → the target's forward → sample → publish          for each (M, output rows)
context   plan_read → the drafter's keys of committed tokens → publish   for each number of taps
block     plan_read → block_rows → the drafter's forward → top_logprobs → publish   for each number of streams
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.graph.buckets import size_for
from runtime.graph.driver import Driver, Graph, Listed
from runtime.graph.fields import DraftFields, StepFields, View
from runtime.graph.results import Results, draft_columns, result_columns
from runtime.kernels_cu import plan_io
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.recorder import Live, Recorded

KINDS = ("step", "context", "block")


@dataclass(slots=True)
class Program:
    """One size's launches. rows: M, taps or streams; out_rows: room for wanted tokens (steps); results: where they end up;
    graph: what replays them; counted: layers whose distinct experts `results.experts` sums."""

    kind: str
    rows: int
    out_rows: int
    records: tuple[Recorded, ...]
    results: Results
    graph: Graph
    captured: bool = False
    arrays: dict[str, DeviceArray] = field(default_factory=dict)
    counted: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}" + (f" out {self.out_rows}" if self.kind == "step" else "")


class Programs:
    """All sizes of one kind of launch. `make` records one of them."""

    def __init__(self, kind: str, sizes: Sequence[tuple[int, int]], driver: Driver, make: Callable[[int, int], Program]) -> None:
        self.kind, self._driver, self._make = kind, driver, make
        self._held = {size: make(*size) for size in sorted(sizes, reverse=True)}
        self.rows = tuple(sorted({rows for rows, _ in sizes}))
        self._outs = {rows: tuple(sorted(out for each, out in sizes if each == rows)) for rows in self.rows}

    def __iter__(self) -> Any:
        """Largest first: the order of capture."""
        return iter(self._held.values())

    def find(self, rows: int, out_rows: int = 0) -> Program:
        """The smallest that holds them. Raises ValueError if none does."""
        size = size_for(self.rows, rows)
        return self._held[size, size_for(self._outs[size], out_rows)]

    def capture(self, program: Program) -> None:
        """Makes a graph of a program, once. A captured program that is not in use may be captured anew."""
        program.graph = self._driver.capture([record.run for record in program.records])
        program.captured = True


class Recording:
    """Records programs over one backend and model; holds the plans' fields and the results' room."""

    def __init__(self, driver: Driver, backend: CudaBackend, comm: Any, model: Any) -> None:
        self.driver, self.backend, self._comm, self._model = driver, backend, comm, model

    def step(self, fields: StepFields, results: Results, rows: int, out_rows: int, top: int) -> Program:
        """One bucket of the target. Its array `taps` [M, n, H] is where the drafter finds the hidden states."""
        ops, view = self.backend, fields.bucket(rows, out_rows)
        plan = view.plan
        with ops.recording(alive=plan.seq, live=fields.live):
            self._first(view)
            passed = self._model.step(ops, self._comm, plan)
            if passed is None:  # another stage goes on: there is nothing to draw
                self._last(fields, results.call({}, live=fields.count("out_rows"), number=fields.number, unions=ops.unions))
                return replace(self._program("step", rows, out_rows, results), counted=len(ops.unions))
            logits, taps = passed
            columns = result_columns(top)
            made = {name: ops.buffer(f"result_{name}", (out_rows, c.width)[: 1 + c.asked], c.dtype) for name, c in columns.items()}
            self._comm.sample(ops, logits, plan.drawing, **made)
            asked = {"logprobs": plan.logprobs.flat, "live_seqs": fields.count("logprobs")}
            call = results.call(made, live=fields.count("out_rows"), number=fields.number, unions=ops.unions, **asked)
            self._last(fields, call)
            return replace(self._program("step", rows, out_rows, results, taps=taps, logits=logits), counted=len(ops.unions))

    def context(self, fields: DraftFields, results: Results, taps: DeviceArray, count: int) -> Program:
        """Keys and values of `count` committed tokens; taps [max rows, n, H] of the last step."""
        view = fields.bucket(1, count)
        with self.backend.recording(alive=view.plan.tap_slot, live=Live(rows=fields.count("tap_rows"))):
            self._first(view)
            self._model.context(self.backend, taps.reshape(len(taps), -1), view.plan)
            self._last(fields, results.call({}, live=fields.count("tap_rows"), number=fields.number))
            return self._program("context", count, 0, results)

    def block(self, fields: DraftFields, results: Results, streams: int, top: int) -> Program:
        """Proposals for `streams` roots."""
        ops, view, shape = self.backend, fields.bucket(streams, 1), self._model.block_shape
        count, masks = streams * shape.block, streams * (shape.block - 1)
        token, pos, seq = (ops.buffer(f"block_{name}", (count,), "i32") for name in ("token", "pos", "seq"))
        mask_rows, live_masks = ops.buffer("block_mask_rows", (masks,), "i32"), ops.buffer("block_live", (1,), "i32")
        with ops.recording(alive=seq, live=Live(rows=live_masks.flat)):
            self._first(view)
            call = plan_io.block_rows(
                streams,
                *shape,
                root=view.plan.root.flat,
                pos=view.plan.pos.flat,
                live=fields.count("root"),
                token=token.flat,
                row_pos=pos.flat,
                seq=seq.flat,
                mask_rows=mask_rows.flat,
                live_masks=live_masks.flat,
            )
            ops.recorded.append(Recorded("block_rows", {}, fields.prepare(call)))
            logits = self._model.block_from(ops, self._comm, view.plan, (token, pos, mask_rows))
            made = {name: ops.buffer(f"draft_{name}", (masks, c.width), c.dtype) for name, c in draft_columns(top).items()}
            self._comm.top_logprobs(ops, logits, **made)
            self._last(fields, results.call(made, live=live_masks.flat, number=fields.number))
            return self._program("block", streams, 0, results, logits=logits)

    def _first(self, view: View) -> None:
        self.backend.recorded.append(Recorded("plan_read", {}, view.read))

    def _last(self, fields: StepFields | DraftFields, call: Any) -> None:
        self.backend.recorded.append(Recorded("publish", {}, fields.prepare(call)))

    def _program(self, kind: str, rows: int, out_rows: int, results: Results, **arrays: DeviceArray) -> Program:
        records = tuple(self.backend.recorded)
        graph = Listed([record.run for record in records], self.driver.device.stream)
        return Program(kind, rows, out_rows, records, results, graph, arrays=arrays)
