"""One rank on a GPU: plans go out through mapped memory, a graph runs, results come back with the launch's number."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.executor import Pending
from runtime.graph.audit import Audit, audit_program, step_known
from runtime.graph.buckets import DEFAULT_SIZES, fit_sizes, out_sizes
from runtime.graph.driver import Driver
from runtime.graph.fields import DraftFields, Fields, StepFields
from runtime.graph.probe import Probe, empty_plans
from runtime.graph.programs import Program, Programs, Recording
from runtime.graph.results import Launch, Results, draft_columns, result_columns, wanted_alternatives
from runtime.kernels_cu.array import DeviceArray
from runtime.kernels_cu.backend import CudaBackend
from runtime.kernels_cu.sample import check_tables
from runtime.kernels_cu.tree_paths import check_plan
from runtime.plan import DraftLayout, Packer, PlanLayout
from runtime.types import MAX_LOGPROBS, Array, DraftLogits, DraftPlan, StepPlan, StepResult
from runtime.worker import Limits, undrawn

DEADLINE_S = 120.0
_NUMBERS = 1 << 32  # of launches; they wrap
NOTHING = empty_plans()


class CudaWorker:
    """Executes plans on one device. Every size is recorded here, once; `capture` makes graphs of what is recorded.

    sizes: the M of steps, rising, `limits.max_rows` the last. A launch takes the smallest that holds its rows, whatever the
    plan's bucket says. `step` leaves the taps of its rows for the `draft` that follows it. seal: no buffer grows afterwards.
    """

    def __init__(
        self,
        driver: Driver,
        backend: CudaBackend,
        comm: Any,
        model: Any,
        limits: Limits,
        layout: PlanLayout,
        sizes: Sequence[int] | None = None,
        deadline_s: float = DEADLINE_S,
        seal: bool = True,
    ) -> None:
        self.limits, self.driver, self.backend = limits, driver, backend
        self._deadline_s, self._launches, self._stepped, self._thread = deadline_s, 0, False, threading.get_ident()
        self._due: Launch | None = None  # the last one of a draft
        self._logprobs, self._wanted = np.zeros(0, np.int32), 0  # of the last step's plan
        self.sizes = fit_sizes(limits.max_rows, sizes)
        recording, seqs = Recording(driver, backend, comm, model), layout.max_seqs
        top = min(MAX_LOGPROBS, limits.vocab_size)
        self._layout, self._plan = layout, StepFields(driver, layout)
        self._fields: list[Fields] = [self._plan]
        self._pack_step = Packer(layout, self._plan.blob.host).pack
        results = Results(driver, limits.max_rows, result_columns(top) if model.draws else {})
        outs = [(rows, out) for rows in self.sizes for out in out_sizes(rows, seqs)]
        self._steps = Programs("step", outs, driver, lambda rows, out: recording.step(self._plan, results, rows, out, top))
        self.kinds = [self._steps]
        if limits.draft_depth:
            self._record_drafter(recording, seqs)
        if seal:
            backend.seal()

    def _record_drafter(self, recording: Recording, seqs: int) -> None:
        driver, top, depth = self.driver, self.limits.draft_top_k, self.limits.draft_depth
        self._draft_layout = DraftLayout(seqs, self._layout.max_pages, self.limits.max_rows)
        self._draft_plan = DraftFields(driver, self._draft_layout)
        self._fields.append(self._draft_plan)
        self._pack_draft = Packer(self._draft_layout, self._draft_plan.blob.host).pack
        noted, drafts = Results(driver, 0, {}), Results(driver, seqs * depth, draft_columns(top))
        plan, taps = self._draft_plan, next(iter(self._steps)).arrays["taps"]
        counts = [(rows, 0) for rows in self.sizes]
        streams = [(count, 0) for count in fit_sizes(seqs, [size for size in DEFAULT_SIZES if size <= seqs])]
        self._contexts = Programs("context", counts, driver, lambda rows, _: recording.context(plan, noted, taps, rows))
        self._blocks = Programs("block", streams, driver, lambda rows, _: recording.block(plan, drafts, rows, top))
        self.kinds += [self._contexts, self._blocks]

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        """Makes graphs of all that is recorded, or of the steps of these buckets alone, largest first; how many there are then.

        Raises ValueError for a bucket that is not recorded.
        """
        self._enter()
        wanted = None if buckets is None else set(buckets)
        if wanted is not None and not wanted <= set(self.sizes):
            raise ValueError(f"capture: {sorted(wanted - set(self.sizes))} are no buckets of this engine; {list(self.sizes)} are")
        programs = [p for p in self.programs() if not p.captured and (wanted is None or (p.kind == "step" and p.rows in wanted))]
        self.driver.device.synchronize()
        for program in tqdm(programs, desc="Capturing", unit="graph", disable=None, leave=False, file=sys.stderr):
            self._launch(program, *NOTHING)  # modules load at their first launch, which a capture must not be
            self._kind(program.kind).capture(program)
        return sum(program.captured for program in self.programs())

    def program_of(self, rows: int, out_rows: int) -> Program:
        """What a step of that many rows, of which out_rows want a token, launches."""
        return self._steps.find(rows, out_rows)

    def programs(self) -> Iterator[Program]:
        """Everything that is launched: steps, largest first, then the drafter's."""
        for kind in self.kinds:
            yield from kind

    def step(self, plan: StepPlan) -> StepResult:
        """Runs the target over the plan's rows and draws the token after each out_row."""
        return self.begin_step(plan).finish()

    def begin_step(self, plan: StepPlan) -> Pending[StepResult]:
        """As `step`, without waiting for the device."""
        self._enter()
        if self.backend.invariant:
            check_plan(plan, self.backend.paths)
        check_tables(plan.adjust_seq, plan.adjust_row, plan.mask_rows)
        program = self.program_of(plan.m, len(plan.out_rows))
        self._pack_step(plan)
        number = self._next()
        self._plan.set_number(number)
        launch = Launch(program.results, number, self._deadline_s, f"step of {plan.m} rows")
        program.graph.launch()
        self._stepped = True
        return Pending(launch.done, launch.wait, lambda: _read_step(program, len(plan.out_rows), self._wanted_by(plan), launch.us))

    def _wanted_by(self, plan: StepPlan) -> int:
        """`wanted_alternatives` of a plan: its batch's most often, whose array comes again."""
        if plan.logprobs is not self._logprobs:
            self._logprobs, self._wanted = plan.logprobs, wanted_alternatives(plan.logprobs)
        return self._wanted

    def draft(self, plan: DraftPlan) -> DraftLogits:
        """Materialises the context of tap_rows (rows of the last step), then proposes a block for each root."""
        return self.begin_draft(plan).finish()

    def begin_draft(self, plan: DraftPlan) -> Pending[DraftLogits]:
        """As `draft`, without waiting for the device. Without roots there is nothing to wait for."""
        streams, taps = len(plan.root), len(plan.tap_rows)
        shape = (streams, self.limits.draft_depth, self.limits.draft_top_k)
        if not shape[1]:
            raise RuntimeError("draft: this model was loaded without a drafter")
        if taps and not self._stepped:
            raise RuntimeError("draft: tap_rows name rows of the last step, but no step has run")
        self._enter()
        self._settle()
        if taps or streams:
            self._pack_draft(plan)
            number = self._next()
            self._draft_plan.set_number(number)  # one for both launches: the first may read it after the second was made
        if taps:
            context = self._contexts.find(taps)
            context.graph.launch()
            self._due = Launch(context.results, number, self._deadline_s, "drafter's context")
        if not streams:
            return Pending(_yes, _nothing, lambda: DraftLogits(np.zeros(shape, np.int32), np.zeros(shape, np.float32)))
        block = self._blocks.find(streams)
        launch = Launch(block.results, number, self._deadline_s, f"draft for {streams} streams")
        block.graph.launch()
        self._due = launch

        def read() -> DraftLogits:
            ids, logp = (block.results.read(name, streams * shape[1]).reshape(shape) for name in ("ids", "logp"))
            return DraftLogits(ids, logp)

        return Pending(launch.done, self._settle, read)

    def audit(self, probe: Probe, repeats: int = 20, measure: bool = True, sizes: Iterable[int] | None = None, ops: bool = True) -> Audit:
        """What each program launches, moves and, if measured, takes when it is full. sizes: of these buckets alone, and drafts.
        ops: time each op too, in a graph of its own.

        Measuring writes into any page of the cache: not with requests open, and not before prefix hits are wanted.
        """
        self._enter()
        chosen = None if sizes is None else set(sizes)
        programs = [p for p in self.programs() if chosen is None or p.kind == "block" or p.rows in chosen]
        before = self._memory()
        for program in programs if measure else ():
            self._launch(program, *_filled(program, probe))
        steady, found = self._memory() == before, []
        for program in programs:
            if measure:
                self._launch(program, *_filled(program, probe))
            step = program.kind == "step"
            known = step_known(program.records, probe, program.rows) if step else {"keys": float(program.rows * probe.ctx)}
            found.append(audit_program(program, self.driver, self.backend.hw, known, repeats if measure else 0, ops))
        return Audit(self.backend.device.gpu, self.backend.hw, tuple(found), self.backend.arena.nbytes, steady)

    def _memory(self) -> tuple[tuple[int, int] | None, int]:
        """The device's free memory and the buffers' bytes, when nothing runs."""
        self._settle()
        self.driver.device.synchronize()
        return self.driver.free_bytes(), self.backend.arena.nbytes

    def _launch(self, program: Program, step: StepPlan, draft: DraftPlan) -> None:
        """One launch of a program over the plan of its kind, to its end."""
        self._settle()
        number = self._next()
        if program.kind == "step":
            self._pack_step(step)
            self._plan.set_number(number)
        else:
            self._pack_draft(draft)
            self._draft_plan.set_number(number)
        program.graph.launch()
        program.results.wait(number, self._deadline_s, program.name)

    def host(self, array: DeviceArray) -> Array:
        """A copy of device memory as the launches so far have left it; for tests and tools."""
        return self.backend.host(array)

    def close(self) -> None:
        """Waits for what still runs and gives back the memory of plans; weights, caches and buffers are the backend's."""
        self._enter()
        self._settle()
        self.driver.device.synchronize()
        self._stepped = False
        for fields in self._fields:
            fields.free()
        self._fields = []

    def _enter(self) -> None:
        """An engine is made in one thread and steps in another."""
        if threading.get_ident() != self._thread:
            self.driver.use()
            self._thread = threading.get_ident()

    def _kind(self, name: str) -> Programs:
        return next(kind for kind in self.kinds if kind.kind == name)

    def _next(self) -> int:
        self._launches = self._launches % (_NUMBERS - 1) + 1
        return self._launches

    def _settle(self) -> None:
        """Waits for a draft that nobody has waited for: its plan is read until then."""
        if self._due is not None:
            self._due.wait()
            self._due = None


def _read_step(program: Program, rows: int, wanted: int, step_us: float) -> StepResult:
    """What a step that is done has left. wanted: alternatives of each of its rows."""
    read = program.results.read
    experts = program.results.experts / program.counted if program.counted else 0.0
    if not program.results.columns:
        return undrawn(step_us, experts)
    return StepResult(
        target=read("target", rows),
        logp=read("logp", rows),
        finite=read("finite", rows),
        top_ids=read("top_ids", rows)[:, :wanted] if wanted else np.empty((rows, 0), np.int32),
        top_logp=read("top_logp", rows)[:, :wanted] if wanted else np.empty((rows, 0), np.float32),
        step_us=step_us,
        experts=experts,
    )


def _yes() -> bool:
    return True


def _nothing() -> None:
    return None


def _filled(program: Program, probe: Probe) -> tuple[StepPlan, DraftPlan]:
    """Plans that fill a program; the one of the other kind holds nothing."""
    if program.kind == "step":
        return probe.step(program.rows, program.out_rows), NOTHING[1]
    return NOTHING[0], probe.draft(0, program.rows) if program.kind == "context" else probe.draft(program.rows, 0)
