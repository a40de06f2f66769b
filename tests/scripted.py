"""A model that is a function of the token path, behind the executor's protocol.

Every cache slot remembers the hash of the path that ends in it, the hash before it and its position. A
row's context must hash to one unbroken path, so a wrong page, a missed move, a slot written twice or
drafter context that was never materialised fails in the step that would have read it; and a context
that is whole but not the row's own changes the tokens, which tests compare with `expected_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.config import EngineConfig, SpeculativeConfig
from runtime.engine import Engine
from runtime.pace import Pace
from runtime.speculate import Speculator, make_speculator
from runtime.stream import TextStream
from runtime.types import DraftLogits, DraftPlan, Emission, Request, StepPlan, StepResult
from runtime.worker import Limits
from tests.language import EMPTY_PATH, TOP_K, Guess, Language, Letters, accept_runs, expected_tokens, make_request, mix, scattered


class BrokenPlan(AssertionError):
    """A plan breaks the protocol, or reads what is not there."""


@dataclass
class Cells:
    """One cache, a cell a slot: the path that ends there, the path before, the position, and whether it is NaN."""

    path: np.ndarray
    before: np.ndarray
    pos: np.ndarray
    bad: np.ndarray

    @staticmethod
    def empty(slots: int) -> Cells:
        u64 = lambda: np.zeros(slots, np.uint64)  # noqa: E731
        return Cells(u64(), u64(), np.full(slots, -1, np.int32), np.zeros(slots, np.bool_))

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        for cells in (self.path, self.before, self.pos, self.bad):
            cells[target] = cells[source]

    def read_context(self, what: str, length: int, pages: np.ndarray, page_size: int) -> tuple[int, bool]:
        """The path of positions 0 … length - 1, and whether it holds NaN; BrokenPlan unless it is one path."""
        if length == 0:
            return EMPTY_PATH, False
        places = np.arange(length)
        if length > len(pages) * page_size or (pages[: -(-length // page_size)] <= 0).any():
            raise BrokenPlan(f"{what}: {length} positions do not fit pages {pages.tolist()}")
        slots = pages[places // page_size] * page_size + places % page_size
        before = np.concatenate([[np.uint64(EMPTY_PATH)], self.path[slots[:-1]]])
        for wrong in np.flatnonzero((self.pos[slots] != places) | (self.before[slots] != before)):
            slot, why = slots[wrong], "is on another path than the position before it"
            if self.pos[slot] != wrong:
                why = f"holds position {self.pos[slot]}"
            raise BrokenPlan(f"{what}: position {wrong} of {length}, slot {slot}, {why}")
        return int(self.path[slots[-1]]), bool(self.bad[slots].any())


class ScriptedExecutor:
    """Executes plans against a Language; checks every one of them.

    guess: the drafter, None for none. bad_rows(step number, plan) names rows that come out NaN, in the
    cache too. fail_at: the step number that raises. delay_s: what each step takes at least.
    """

    def __init__(
        self,
        language: Language | None = None,
        *,
        guess: Guess | None = None,
        num_pages: int = 64,
        page_size: int = 4,
        max_rows: int = 256,
        max_positions: int = 512,
        draft_depth: int = 7,
        bad_rows: Callable[[int, StepPlan], Iterable[int]] | None = None,
        fail_at: int | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.language = language or Language()
        self.limits = Limits(
            vocab_size=self.language.vocab_size,
            max_rows=max_rows,
            num_pages=num_pages,
            page_size=page_size,
            max_positions=max_positions,
            draft_depth=draft_depth if guess else 0,
            draft_top_k=TOP_K,
        )
        self.guess, self.bad_rows, self.fail_at, self.delay_s = guess, bad_rows, fail_at, delay_s
        self.steps = self.drafts = self.guesses = 0
        self.plans: list[StepPlan] = []
        self.closed = False
        self._target = Cells.empty(num_pages * page_size)
        self._drafter = Cells.empty(num_pages * page_size)
        self._last: tuple[StepPlan, np.ndarray, np.ndarray] | None = None  # plan, path of each row, path before it

    def step(self, plan: StepPlan) -> StepResult:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fail_at == self.steps:
            raise RuntimeError("scripted failure")
        check_plan(plan, self.limits)
        self._move(plan.moves)
        path, before, bad = self._run_rows(plan)
        self._last = (plan, path, before)
        self.plans.append(plan)
        self.steps += 1
        return self._draw(plan, path, bad)

    def draft(self, plan: DraftPlan) -> DraftLogits:
        if self.guess is None:
            raise BrokenPlan("draft: there is no drafter")
        self.drafts += 1
        self._materialise(plan)
        depth, ids, logp = self.limits.draft_depth, [], []
        for b, (root, pos) in enumerate(zip(plan.root.tolist(), plan.pos.tolist(), strict=True)):
            if pos + depth >= self.limits.max_positions:
                raise BrokenPlan(f"draft: a block from position {pos} on reaches past {self.limits.max_positions}")
            path, _ = self._drafter.read_context(f"draft: root {b}", pos, plan.pages[b], self.limits.page_size)
            path, right = mix(path, root), []
            for _ in range(depth):
                right.append(self.language.likeliest(path))
                path = mix(path, right[-1])
            some_ids, some_logp = self.guess(right, self.guesses, self.limits.vocab_size)
            self.guesses += 1
            ids.append(some_ids)
            logp.append(some_logp)
        if not ids:
            return DraftLogits(np.zeros((0, depth, TOP_K), np.int32), np.zeros((0, depth, TOP_K), np.float32))
        return DraftLogits(np.stack(ids), np.stack(logp))

    def close(self) -> None:
        self.closed = True

    def _materialise(self, plan: DraftPlan) -> None:
        if not len(plan.tap_rows):
            return
        if self._last is None:
            raise BrokenPlan("draft: taps before any step")
        last, path, before = self._last
        if (last.pos[plan.tap_rows] != plan.tap_pos).any():
            raise BrokenPlan(f"draft: taps of rows at {last.pos[plan.tap_rows].tolist()} for positions {plan.tap_pos.tolist()}")
        if (plan.tap_slot < self.limits.page_size).any() or len(set(plan.tap_slot.tolist())) != len(plan.tap_slot):
            raise BrokenPlan(f"draft: tap slots {plan.tap_slot.tolist()} repeat or lie in the null page")
        self._drafter.path[plan.tap_slot] = path[plan.tap_rows]
        self._drafter.before[plan.tap_slot] = before[plan.tap_rows]
        self._drafter.pos[plan.tap_slot] = plan.tap_pos

    def _move(self, moves: np.ndarray) -> None:
        if not len(moves):
            return
        fresh = set(self._last[0].slot.tolist()) if self._last else set()
        source, target = moves[:, 0], moves[:, 1]
        if not set(moves.ravel().tolist()) <= fresh:
            raise BrokenPlan(f"moves {moves.tolist()} touch slots that the last step did not write")
        if len(set(target.tolist())) != len(moves) or len(set(source.tolist())) != len(moves) or (source == target).any():
            raise BrokenPlan(f"moves {moves.tolist()} repeat a slot or stand still")
        self._target.copy(source, target)

    def _run_rows(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        poisoned = set(self.bad_rows(self.steps, plan)) if self.bad_rows else set()
        path, before, bad = np.zeros(plan.m, np.uint64), np.zeros(plan.m, np.uint64), np.zeros(plan.m, np.bool_)
        context = [
            self._target.read_context(f"sequence {b}", int(ctx), plan.pages[b], self.limits.page_size) for b, ctx in enumerate(plan.ctx)
        ]
        seen = [_visible(plan, row) for row in range(plan.m)]
        for row in range(plan.m):
            b, first = int(plan.seq[row]), int(plan.row0[plan.seq[row]])
            above = [first + j for j in seen[row] if first + j != row]
            parent = max(above, key=lambda r: plan.pos[r], default=None)
            if parent is None:
                want_pos, above_path, above_bad = int(plan.ctx[b]), *context[b]
            else:
                want_pos, above_path, above_bad = int(plan.pos[parent]) + 1, int(path[parent]), bool(bad[parent])
                if set(seen[row]) != {*seen[parent], row - first}:
                    raise BrokenPlan(f"row {row} sees {seen[row]}, its parent row {parent} sees {seen[parent]}")
            if plan.pos[row] != want_pos:
                raise BrokenPlan(f"row {row} is at position {plan.pos[row]}, its path ends at {want_pos - 1}")
            before[row], path[row] = above_path, mix(above_path, int(plan.token[row]))
            bad[row] = above_bad or row in poisoned
        cells = self._target
        cells.path[plan.slot], cells.before[plan.slot], cells.pos[plan.slot], cells.bad[plan.slot] = path, before, plan.pos, bad
        return path, before, bad

    def _draw(self, plan: StepPlan, path: np.ndarray, bad: np.ndarray) -> StepResult:
        for_seq: dict[int, list[tuple[int, float, float]]] = {}
        for_row: dict[int, list[tuple[int, float, float]]] = {}
        for entries, by, into in ((plan.adjust_seq, plan.adjust_seq_by, for_seq), (plan.adjust_row, plan.adjust_row_by, for_row)):
            for (at, token), (scale, add) in zip(entries.tolist(), by.tolist(), strict=True):
                if (scale, add) != (1.0, 0.0):
                    into.setdefault(at, []).append((token, scale, add))
        wanted = max(int(plan.logprobs.max(initial=-1)), 0)
        rows = plan.out_rows
        target = np.zeros(len(rows), np.int32)
        for i, row in enumerate(rows.tolist()):
            b = int(plan.seq[row])
            adjust = frozenset(for_seq.get(b, []) + for_row.get(row, []))
            target[i] = self.language.draw(int(path[row]), int(plan.pos[row]) + 1, int(plan.seed[b]), float(plan.temperature[b]), adjust)
        target[bad[rows]] = self.language.vocab_size - 1  # means nothing
        logp = -(target % 7).astype(np.float32)
        top = (target[:, None] + np.arange(wanted)) % self.language.vocab_size
        return StepResult(target, logp, ~bad[rows], top.astype(np.int32), -np.arange(wanted, dtype=np.float32) + logp[:, None], 1.0)


def _visible(plan: StepPlan, row: int) -> list[int]:
    bits = int.from_bytes(plan.ancestors[row].astype("<u8").tobytes(), "little")
    return [j for j in range(bits.bit_length()) if bits >> j & 1]


def check_plan(plan: StepPlan, limits: Limits) -> None:
    """Raises BrokenPlan unless the plan keeps the protocol, as far as a single plan shows."""

    def want(holds: object, what: str) -> None:
        if not holds:
            raise BrokenPlan(f"step plan: {what}")

    streams, size = len(plan.ctx), limits.page_size
    want(0 < plan.m <= min(plan.bucket, limits.max_rows), f"{plan.m} rows, bucket {plan.bucket}, limit {limits.max_rows}")
    want((np.diff(plan.seq) >= 0).all() and set(plan.seq.tolist()) == set(range(streams)), "rows of a sequence are not together")
    want((plan.row0 == np.searchsorted(plan.seq, np.arange(streams))).all(), f"row0 {plan.row0.tolist()}")
    want((plan.token >= 0).all() and (plan.token < limits.vocab_size).all(), "a token is outside the vocabulary")
    place = plan.ctx[plan.seq] + np.arange(plan.m) - plan.row0[plan.seq]
    want((place // size < plan.pages.shape[1]).all(), "a row lies past its sequence's pages")
    page = plan.pages[plan.seq, place // size]
    want((page > 0).all() and (page < limits.num_pages).all(), "a row writes to the null page or to none")
    want((plan.slot == page * size + place % size).all(), "a slot is not that of ctx + its place")
    want(len(set(plan.slot.tolist())) == plan.m, "two rows share a slot")
    for b in range(streams):
        others = set(np.delete(plan.pages, b, axis=0).ravel().tolist()) - {0}
        want(not others & set(page[plan.seq == b].tolist()), f"sequence {b} writes to a page that another one holds")
    want(plan.pos.max() < limits.max_positions, f"position {plan.pos.max()} of {limits.max_positions}")
    want((np.diff(plan.out_rows) > 0).all() and set(plan.out_rows.tolist()) <= set(range(plan.m)), f"out_rows {plan.out_rows.tolist()}")
    for name in ("seed", "temperature", "top_p", "min_p", "top_k", "logprobs"):
        want(getattr(plan, name).shape == (streams,), f"{name} has shape {getattr(plan, name).shape} for {streams} sequences")
    for name in ("token", "pos", "slot", "seq", "ctx", "row0", "pages", "moves", "out_rows", "ancestors", "seed"):
        dtype = np.uint64 if name in ("ancestors", "seed") else np.int32
        want(getattr(plan, name).dtype == dtype, f"{name} is {getattr(plan, name).dtype}")
    want(set(plan.adjust_row[:, 0].tolist()) <= set(plan.out_rows.tolist()), "an adjusted row has no logits")


EOS = 1


def make_engine(
    executor: ScriptedExecutor, speculative: Any = None, *, speculator: Speculator | None = None, pace: Pace | None = None, **config: Any
) -> Engine:
    """An engine over a scripted executor; its text is one letter a token, its end of sequence is token EOS."""
    limits = executor.limits
    chosen = EngineConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": limits.max_rows, "block_size": limits.page_size, **config})
    speculator = speculator or make_speculator(executor, SpeculativeConfig.parse(speculative))
    return Engine(executor, chosen, lambda params: TextStream(Letters(), params, frozenset([EOS])), speculator, eos_ids=[EOS], pace=pace)


def run_all(engine: Engine, requests: Sequence[Request], most_steps: int = 20_000) -> dict[str, list[Emission]]:
    """Steps until all requests have ended; page accounts are checked after every step. What each request received."""
    got: dict[str, list[Emission]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request, got[request.id].append)
    step_until(engine, lambda: all(g and g[-1].finish for g in got.values()), most_steps)
    return got


def step_until(engine: Engine, done: Callable[[], bool], most_steps: int = 20_000) -> None:
    for _ in range(most_steps):
        if done():
            return
        engine.step()
        if engine.dead is not None:
            raise engine.dead
        engine._scheduler.check()
    raise AssertionError(f"not done after {most_steps} steps: {engine.stats()}")


def tokens_of(emissions: Sequence[Emission]) -> list[int]:
    return [token for emission in emissions for token in emission.tokens]


__all__ = [
    "EOS",
    "BrokenPlan",
    "Language",
    "Letters",
    "ScriptedExecutor",
    "accept_runs",
    "check_plan",
    "expected_tokens",
    "make_engine",
    "make_request",
    "run_all",
    "scattered",
    "step_until",
    "tokens_of",
]
