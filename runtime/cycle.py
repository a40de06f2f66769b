"""One decode step, one way: draft → grow → plan → verify → accept → emit.

What a step leaves to the next one is two lists, and both are due before anything could miss them:

    taps   rows of this step whose tokens are committed; the drafter's K/V of those tokens are written
           by the next draft call, which comes before the next step admits anybody
    moves  slots of accepted nodes that are not where their position belongs; they are the first thing
           of the next step, before it writes or reads

So a page may be registered for prefix hits before the next step is planned: whoever hits it reads it in the next step at the
earliest, after its moves, and is drafted for one step later still, after its taps. The same holds when
the sequence is gone by then. Pages that were given back meanwhile may receive a move or a tap too:
their new holder writes later than that.

Whatever the device need not wait for is done while it is busy. Under the draft, or under the step where there is none: what the
last step leaves is put away (outcomes, page keys, pages of rejected nodes), moves are found, pages and seats of the next step, where
its rows will lie if trees are as large as they were, what the last step taught. Under the step: `tell`, which turns the last step's
tokens into text and hands it out, what its trees will be judged by, and which tokens would end anybody: without these all requests
are settled in one go. At the end of both: what comes next, as a rehearsal (`runtime.flight`). Without a next step nothing is held back.

    host    settle │draft     put away, pages │grow plan │verify     emit of the step before  rehearse │settle
    device         │▕▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▏      │          │▕▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▏│
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from itertools import repeat

import numpy as np

from runtime.config import EngineConfig
from runtime.emit import NON_FINITE, Outcome, decide, goes_on, quiet, tell
from runtime.executor import Executor, begin_step
from runtime.flight import Flight, Rehearsal
from runtime.grove import Grove, Offer
from runtime.masks import prune
from runtime.pace import Pace
from runtime.rows import Planner, Share
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculate import Speculator, StepWatcher, Taps, Verified
from runtime.stats import EngineStats
from runtime.types import I32, I64, DraftTree, Emission, StepPlan, StepResult
from runtime.verdicts import Verdict, Walks, judge

Delivery = tuple[Sequence, Emission]


class Cycle:
    """Runs steps over a scheduler's sequences; holds what one step leaves to the next."""

    def __init__(
        self,
        executor: Executor,
        speculator: Speculator,
        scheduler: Scheduler,
        config: EngineConfig,
        stats: EngineStats,
        pace: Pace | None = None,
    ) -> None:
        self._executor = executor
        self._speculator = speculator
        self._watcher = speculator if isinstance(speculator, StepWatcher) else None
        self._scheduler = scheduler
        self._pace = pace
        self._planner = Planner(scheduler.pool.page_size, config, scheduler.tables)
        self._stats = stats
        self._pool = scheduler.pool
        self._keep_taps = executor.limits.draft_depth > 0 and speculator.nodes > 0
        self._taps = Taps.none()
        self._pruned: frozenset[str] = frozenset()  # sequences whose trees a constraint made smaller
        self._moves: I32 = np.zeros((0, 2), np.int32)
        self._astray: tuple[I32, I32, I64, I32] | None = None  # what they are found from: slots, rows, places, slots of these
        self._flying = False  # a step is in flight
        self._settled: Iterable[tuple[Share, Verdict | None, Outcome | None]] = ()  # of the last step, until it is put away
        self._result: StepResult | None = None  # likewise
        self._untold: tuple[list[Outcome], StepResult] | None = None  # of the last step
        self._rehearsal = Rehearsal()
        self._lost: list[Sequence] = []  # to be taken out when no step of theirs is in flight

    def run(self, meanwhile: Callable[[], object] = bool) -> None:
        """One step for everybody who is due; what it has to say is left for `tell`. An exception leaves the cycle unusable.

        meanwhile: called while the device is busy with the step, if the one before was not told of: the place to `tell`.
        """
        start_s, stats = time.perf_counter(), self._stats
        flown_s = stats.flown_s
        trees = self._draft()
        with stats.stage("plan"):
            shares = self._scheduler.schedule(trees)
            if not shares:
                raise RuntimeError("no sequence could be scheduled although some wait")
            plan, grove = self._planner.plan(shares, self._moves)
        with stats.stage("verify"):
            flight = Flight(begin_step(self._executor, plan), stats)
            self._moves = self._moves[:0]
        self._flying = True
        with stats.stage("accept"):
            self._put_away()
            grove.prepare()
            calm = quiet(shares)
            chunks = [share.count for share in shares if share.before > 0]
        if self._untold is not None:
            meanwhile()
        with stats.stage("verify"):
            result = flight.land(self._rehearsal, lambda: self._rehearse(shares, plan, grove))
        self._flying = False
        with stats.stage("accept"):
            verdicts = self._judge(grove, plan, result)
            if not self._settle_all(shares, plan, verdicts, calm):
                self._settle(shares, plan, verdicts)
            self._result = result
        if self._watcher is not None:
            self._watcher.after_step(plan.m, plan.bucket, _Outcomes(shares, verdicts, self._pruned), result.experts, stats)
        took_s, streams = time.perf_counter() - start_s, len(shares) - len(chunks)
        stats.count_step(plan.bucket, plan.m, took_s, result.experts, streams, sum(chunks), stats.flown_s - flown_s)

    def _rehearse(self, shares: list[Share], plan: StepPlan, grove: Grove) -> None:
        """What the host does before the next launch, on what it has: no draw has come yet, so everything is judged to be token 0."""
        judge(grove, np.zeros(len(plan.out_rows), np.int32), np.ones(len(plan.out_rows), np.bool_))
        if self._planner.bent:  # masks take a millisecond, and their state is not to be asked twice
            return
        self._planner.plan(shares, plan.moves)
        if grove.bare and len(grove) == plan.m:
            self._planner.foresee([share.start + 1 for share in shares])

    def tell(self) -> list[Delivery]:
        """What the last step that was not told of says to its requests. Who turns out to be past saving goes as soon as may be."""
        self._put_away()
        if self._untold is None:
            return []
        (outcomes, result), self._untold = self._untold, None
        deliveries: list[Delivery] = []
        for found in outcomes:
            goes_on = found.finish is None
            deliveries.append((found.share.sequence, tell(found, result, self._stats)))
            if goes_on and found.finish is not None:
                found.share.sequence.lost = True
                self._lost.append(found.share.sequence)
        if not self._flying:
            self._drop_lost()
        if self._watcher is not None:  # a step flies longer than a draft, 0.26 and 0.2 ms for the demo model on an H200
            self._watcher.learn()
        return deliveries

    def _drop_lost(self) -> None:
        for sequence in self._lost:
            self._scheduler.remove(sequence)
        self._lost.clear()

    def _draft(self) -> Mapping[str, DraftTree]:
        stats = self._stats
        with stats.stage("plan"):
            if self._pace is not None:
                self._pace.steer(self._scheduler)
            roots = self._scheduler.roots(self._speculator.nodes, self._speculator.depth)
            if self._watcher is not None:
                self._watcher.before_step(self._scheduler.load(), stats)
        taps, self._taps = self._taps, Taps.none()
        grown = self._speculator.propose(roots, taps, stats)
        if stats.in_flight or not self._may_wait():
            with stats.stage("accept"):
                self._put_away()
        with stats.stage("plan"):
            self._find_moves()
            self._scheduler.prepare()
            if stats.in_flight:
                self._planner.get_ready(self._scheduler.expect(self._planner.nodes))
        trees: Mapping[str, DraftTree] = Offer([sequence.id for sequence in roots.sequences], grown())
        self._pruned = frozenset()
        held = [s for s in self._scheduler.running if s.constraint is not None and s.id in trees] if roots else []
        if held:
            pruned = {s.id: prune(s.constraint, trees[s.id]) for s in held}
            self._pruned = frozenset(id for id, tree in pruned.items() if len(tree) != len(trees[id]))
            trees = {**trees, **pruned}
        return trees

    def _judge(self, grove: Grove, plan: StepPlan, result: StepResult) -> SequenceOf[Verdict]:
        """A verdict for each tree, in order."""
        if len(result.target) != len(plan.out_rows) or len(result.finite) != len(plan.out_rows):
            raise RuntimeError(f"executor: {len(result.target)} targets for {len(plan.out_rows)} out_rows")
        if not grove:
            return []
        known = result.target.view(np.uint32) < self._executor.limits.vocab_size  # below 0 is far above
        return judge(grove, result.target, known & result.finite)

    def _settle_all(
        self, shares: list[Share], plan: StepPlan, verdicts: SequenceOf[Verdict], calm: tuple[frozenset[int], int] | None
    ) -> bool:
        """As `_settle`, in one go, if all that happens to anybody is that it gets its tokens; else False. calm: `quiet`."""
        if calm is None or self._lost or not isinstance(verdicts, Walks):
            return False
        (ends, left), tokens, edges = calm, verdicts.tokens, verdicts.edges.tolist()
        if np.maximum.reduce(verdicts.counts) >= left or not ends.isdisjoint(tokens):
            return False
        at = 0
        for share, end in zip(shares, edges[1:], strict=True):
            share.sequence.gain(tokens[at:end])
            at = end
        self._settled = zip(shares, verdicts, repeat(None))
        if self._keep_taps or not verdicts.grove.bare:
            self._leave(plan, verdicts.rows.astype(np.int32), verdicts.places)
        return True

    def _settle(self, shares: list[Share], plan: StepPlan, verdicts: SequenceOf[Verdict]) -> None:
        """Decides for every share how it goes on, its rows to the next step's taps and moves. No more: a draft waits for it."""
        rows: list[int] = []  # of committed tokens
        places: list[int] = []  # the rows whose slots these tokens belong in
        coming, settled = iter(verdicts), list[tuple[Share, Verdict | None, Outcome | None]]()
        for share, row0 in zip(shares, plan.row0.tolist(), strict=True):
            sequence, verdict, before, found = share.sequence, next(coming) if share.nodes else None, share.before, None
            if sequence.lost:
                continue
            if verdict is not None and goes_on(share, verdict):
                keep = len(verdict.path)
                sequence.computed = share.start + keep
            else:
                found = None if verdict is None else decide(share, verdict)
                keep = self._commit(share, found) - share.start
            settled.append((share, verdict, found))
            if keep > 0 and (self._keep_taps or share.nodes > 1):
                if before:
                    rows += range(row0, row0 + min(before, keep))
                if verdict is not None and keep > before:
                    root = row0 + before
                    rows += [root + node for node in verdict.path[: keep - before]]
                places += range(row0, row0 + keep)
            if found is not None and found.finish is not None:
                self._scheduler.remove(sequence)
        self._settled = settled
        self._drop_lost()
        if rows:
            self._leave(plan, np.array(rows, np.int32), np.array(places))

    def _may_wait(self) -> bool:
        """Whether the next step is planned alike before and after `_put_away`: no pages come back, are looked up or run short."""
        scheduler = self._scheduler
        enough = self._pool.available >= len(scheduler.running)
        return not (self._speculator.nodes or scheduler.waiting or self._planner.bent) and enough

    def _put_away(self) -> None:
        """What the last step leaves that no draft waits for: outcomes, full pages to the cache, those of rejected nodes to the pool."""
        if self._result is None:
            return
        outcomes: list[Outcome] = []
        stats, size = self._stats, self._pool.page_size
        for share, verdict, found in self._settled:
            sequence, base = share.sequence, share.start + share.before
            if base > sequence.reached:
                stats.progress += base - sequence.reached
                sequence.reached = base
            if verdict is None:
                continue
            if found is None:
                found = Outcome(share, verdict, len(verdict.tokens))
                sequence.history.push(verdict.tokens)
            outcomes.append(found)
            stats.generation_tokens += found.kept
            stats.progress += found.kept + (found.finish is not None)
            if found.finish is None:
                if sequence.computed >= (sequence.registered + 1) * size:
                    self._register(sequence)
                self._scheduler.give_back(sequence)
        self._settled = ()
        self._untold, self._result = (outcomes, self._result), None

    def _leave(self, plan: StepPlan, rows: I32, places: I64) -> None:
        """Leaves taps and moves for committed tokens: rows [n] and, for each, the row that owns the slot of its position."""
        slot = plan.slot.take(places)
        if self._keep_taps:
            self._taps = Taps(rows, plan.pos.take(rows), slot)
        self._astray = plan.slot, rows, places, slot

    def _find_moves(self) -> None:
        """Of what was left for the next step, which no draft waits for."""
        if self._astray is None:
            return
        (slots, rows, places, slot), self._astray = self._astray, None
        astray = (rows != places).nonzero()[0]
        if len(astray):
            self._moves = np.stack([slots.take(rows.take(astray)), slot.take(astray)], axis=1)

    def _commit(self, share: Share, found: Outcome | None) -> int:
        """Advances `computed`, registers full pages of who has ended; returns the position up to which the step's K/V will be read.

        A page is registered once a finite row has attended to all of it: NaN anywhere in a context
        reaches every row that sees it, so pages of a prompt wait for the prompt's last row.
        """
        sequence, base = share.sequence, share.start + share.before
        if found is None:
            sequence.computed = base
            return base
        sequence.computed = computed = min(base + len(found.verdict.path), sequence.length)
        if found.finish is None:
            return computed
        if found.error == NON_FINITE:
            self._pool.forget(sequence.pages.tolist())
            return share.start
        self._register(sequence)
        return sequence.registered * self._pool.page_size

    def _register(self, sequence: Sequence) -> None:
        """Makes full pages findable."""
        full = sequence.computed // self._pool.page_size
        if full > sequence.registered and self._pool.caching:
            pages = sequence.pages[sequence.registered : full].tolist()
            for i, page in enumerate(pages, sequence.registered):
                self._pool.register(page, sequence.key(i))
            sequence.registered = full


class _Outcomes(Mapping[str, Verified]):
    """What became of the trees of decoding sequences, by sequence id; looked at when there is time."""

    def __init__(self, shares: list[Share], verdicts: SequenceOf[Verdict], pruned: frozenset[str]) -> None:
        self._shares, self._verdicts, self._pruned = shares, verdicts, pruned

    @cached_property
    def _each(self) -> dict[str, Verified]:
        trees = [share for share in self._shares if share.nodes]
        return {
            share.sequence.id: Verified(share.nodes - 1, verdict.path, not verdict.corrupted and share.sequence.id not in self._pruned)
            for share, verdict in zip(trees, self._verdicts, strict=True)
            if share.before == 0
        }

    def __getitem__(self, id: str) -> Verified:
        return self._each[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)
