"""One decode step, one way: draft → grow → plan → verify → accept → emit.

What a step leaves to the next one is two lists, and both are due before anything could miss them:

    taps   rows of this step whose tokens are committed; the drafter's K/V of those tokens are written
           by the next draft call, which comes before the next step admits anybody
    moves  slots of accepted nodes that are not where their position belongs; they are the first thing
           of the next step, before it writes or reads

So a page may be registered for prefix hits at once: whoever hits it reads it in the next step at the
earliest, after its moves, and is drafted for one step later still, after its taps. The same holds when
the sequence is gone by then. Pages that were given back meanwhile may receive a move or a tap too:
their new holder writes later than that.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from runtime.accept import ranks_of
from runtime.config import EngineConfig
from runtime.executor import Executor
from runtime.masks import prune, push
from runtime.pace import Pace
from runtime.rows import Share, make_step_plan
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculate import Speculator, StepWatcher, Taps, Verified
from runtime.stats import EngineStats
from runtime.types import I32, DraftTree, Emission, StepPlan, StepResult, TokenLogprob
from runtime.verdicts import Verdict, judge

LOG = logging.getLogger(__name__)
NON_FINITE = "the model's output was not finite; the request was ended"
CONSTRAINT_FAILED = "the output could no longer be held to the requested form; the request was ended"
STREAM_FAILED = "the output could not be turned into text; the request was ended"

Delivery = tuple[Sequence, Emission]


class ConstraintFailed(Exception):
    """A sequence's constraint gave up: a lexer or parser limit, or a fault of its own."""


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
        self._config = config
        self._stats = stats
        self._pool = scheduler.pool
        self._keep_taps = executor.limits.draft_depth > 0
        self._taps = Taps.none()
        self._pruned: frozenset[str] = frozenset()  # sequences whose trees a constraint made smaller
        self._moves: I32 = np.zeros((0, 2), np.int32)

    def run(self) -> list[Delivery]:
        """One step for everybody who is due; what it emits. An exception leaves the cycle unusable."""
        start, stats = time.perf_counter(), self._stats
        trees = self._draft()
        with stats.stage("plan"):
            shares = self._scheduler.schedule(trees)
            if not shares:
                raise RuntimeError("no sequence could be scheduled although some wait")
            plan = make_step_plan(shares, self._moves, self._pool.page_size, self._config)
        with stats.stage("verify"):
            result = self._executor.step(plan)
            self._moves = self._moves[:0]
        with stats.stage("accept"):
            verdicts = self._judge(shares, plan, result)
        with stats.stage("emit"):
            deliveries = self._settle(shares, plan, verdicts, result)
        if self._watcher is not None:
            self._watcher.after_step(plan.m, plan.bucket, _verified(shares, verdicts, self._pruned), result.experts, stats)
        streams = sum(share.before == 0 and share.tree is not None for share in shares)
        prompt = sum(share.count for share in shares if share.before > 0)
        stats.count_step(plan.bucket, plan.m, time.perf_counter() - start, result.experts, streams, prompt)
        return deliveries

    def _draft(self) -> dict[str, DraftTree]:
        with self._stats.stage("plan"):
            if self._pace is not None:
                self._pace.steer(self._scheduler)
            roots = self._scheduler.roots(self._speculator.nodes, self._speculator.depth)
            if self._watcher is not None:
                self._watcher.before_step(self._scheduler.load(), self._stats)
        taps, self._taps = self._taps, Taps.none()
        trees = self._speculator.propose(roots, taps, self._stats)
        held = {sequence.id: sequence.constraint for sequence in self._scheduler.running}
        pruned = {root.id: prune(held.get(root.id), tree) for root, tree in zip(roots, trees, strict=True)}
        self._pruned = frozenset(root.id for root, tree in zip(roots, trees, strict=True) if len(pruned[root.id]) != len(tree))
        return pruned

    def _judge(self, shares: list[Share], plan: StepPlan, result: StepResult) -> list[Verdict]:
        """A verdict for each tree, in order."""
        if len(result.target) != len(plan.out_rows) or len(result.finite) != len(plan.out_rows):
            raise RuntimeError(f"executor: {len(result.target)} targets for {len(plan.out_rows)} out_rows")
        trees = [share.tree for share in shares if share.tree is not None]
        if not trees:
            return []
        sound = result.finite & (result.target >= 0) & (result.target < self._executor.limits.vocab_size)
        return judge(trees, result.target, sound)

    def _settle(self, shares: list[Share], plan: StepPlan, verdicts: list[Verdict], result: StepResult) -> list[Delivery]:
        """Gives every share's tokens to its stream, its pages to the cache, its rows to the next step's taps and moves."""
        deliveries: list[Delivery] = []
        rows: list[int] = []  # of committed tokens
        places: list[int] = []  # the rows whose slots these tokens belong in
        coming = iter(verdicts)
        for share, row0 in zip(shares, plan.row0.tolist(), strict=True):
            verdict = emission = None
            if share.tree is not None:
                verdict = next(coming)
                emission = self._emit(share, verdict, result)
                deliveries.append((share.sequence, emission))
            keep = self._commit(share, verdict, emission) - share.start
            if keep > 0 and (self._keep_taps or share.nodes > 1):
                own = list(range(row0, row0 + min(share.before, keep)))
                if verdict is not None:
                    root = row0 + share.before
                    own += [root + node for node in verdict.path[: keep - len(own)]]
                rows += own
                places += range(row0, row0 + keep)
            self._retire(share.sequence, emission)
        if rows:
            self._leave(plan, np.array(rows, np.int32), np.array(places, np.int32))
        return deliveries

    def _leave(self, plan: StepPlan, rows: I32, places: I32) -> None:
        """Leaves taps and moves for committed tokens: rows [n] and, for each, the row that owns the slot of its position."""
        slot = plan.slot[places]
        astray = plan.slot[rows] != slot
        if astray.any():
            self._moves = np.stack([plan.slot[rows[astray]], slot[astray]], axis=1)
        if self._keep_taps:
            seq = plan.seq[places]
            self._taps = Taps(rows, (plan.ctx - plan.row0)[seq] + places, slot)

    def _emit(self, share: Share, verdict: Verdict, result: StepResult) -> Emission:
        """Cuts the drawn tokens where the request ends and appends what is kept. An error is this request's alone."""
        sequence, stats = share.sequence, self._stats
        text, kept, finish, stop_reason, error = "", 0, None, None, None
        try:
            if sequence.constraint is not None and sequence.constraint.error is not None:
                raise ConstraintFailed(sequence.constraint.error)
            pushed = sequence.stream.push(verdict.tokens)
            text, kept, finish, stop_reason = pushed.text, pushed.kept, pushed.finish, pushed.stop_reason
            if finish is None and kept != len(verdict.tokens):
                raise RuntimeError(f"the stream kept {kept} of {len(verdict.tokens)} tokens and goes on")
        except ConstraintFailed as failure:  # it masked nothing in this step, so the tokens drawn are not kept
            LOG.warning("request %s: %s", sequence.id, failure)
            text, finish, error = sequence.flush(), "error", CONSTRAINT_FAILED
        except Exception:
            LOG.exception("request %s: its text stream failed", sequence.id)
            finish, error = "error", STREAM_FAILED
        if finish is None and verdict.corrupted:
            text, finish, error = text + sequence.flush(), "error", NON_FINITE
            stats.corrupted_requests += 1
            self._pool.forget(sequence.pages.tolist())
        tokens = verdict.tokens[:kept]
        sequence.append(tokens)
        sequence.history.push(tokens)
        if finish is None:
            push(sequence.constraint, tokens)
        drafted, accepted = share.nodes - 1, max(0, min(len(verdict.path) - 1, kept))
        ranks = ranks_of(share.tree, verdict.path[1 : accepted + 1]) if drafted and share.tree is not None else ()
        if drafted:
            stats.count_draft(drafted, accepted, ranks)
        stats.generation_tokens += kept
        stats.progress += kept + (finish is not None)
        return Emission(
            id=sequence.id,
            tokens=tuple(tokens),
            text=text,
            logprobs=_logprobs(sequence, verdict, kept, result),
            finish=finish,
            stop_reason=stop_reason,
            error=error,
            cached_tokens=sequence.cached_tokens or 0,
            accepted=accepted if drafted else None,
            drafted=drafted,
            ranks=ranks,
            admitted_s=sequence.admitted_s,
            experts=result.experts,
        )

    def _commit(self, share: Share, verdict: Verdict | None, emission: Emission | None) -> int:
        """Advances `computed` and registers full pages; returns the position up to which the step's K/V will be read.

        A page is registered once a finite row has attended to all of it: NaN anywhere in a context
        reaches every row that sees it, so pages of a prompt wait for the prompt's last row.
        """
        sequence, base = share.sequence, share.start + share.before
        if base > sequence.reached:
            self._stats.progress += base - sequence.reached
            sequence.reached = base
        if verdict is None or emission is None:
            sequence.computed = base
            return base
        sequence.computed = min(base + len(verdict.path), sequence.length)
        if emission.error == NON_FINITE:
            return share.start
        full = sequence.computed // self._pool.page_size
        if full > sequence.registered and self._pool.caching:
            pages = sequence.pages[sequence.registered : full].tolist()
            for i, page in enumerate(pages, sequence.registered):
                self._pool.register(page, sequence.key(i))
            sequence.registered = full
        return sequence.computed if emission.finish is None else sequence.registered * self._pool.page_size

    def _retire(self, sequence: Sequence, emission: Emission | None) -> None:
        """Returns pages: all of them if the sequence has ended, else those of rejected nodes."""
        if emission is not None and emission.finish is not None:
            self._stats.finished[emission.finish] += 1
            self._scheduler.remove(sequence)
        else:
            self._scheduler.give_back(sequence)


def _verified(shares: list[Share], verdicts: list[Verdict], pruned: frozenset[str]) -> dict[str, Verified]:
    """What became of the trees of decoding sequences, by sequence id."""
    trees = [share for share in shares if share.tree is not None]
    return {
        share.sequence.id: Verified(share.nodes - 1, verdict.path, not verdict.corrupted and share.sequence.id not in pruned)
        for share, verdict in zip(trees, verdicts, strict=True)
        if share.before == 0
    }


def _logprobs(sequence: Sequence, verdict: Verdict, kept: int, result: StepResult) -> tuple[TokenLogprob, ...] | None:
    wanted = sequence.params.logprobs
    if wanted is None:
        return None
    rows = [verdict.first_out + node for node in verdict.path[:kept]]
    return tuple(
        TokenLogprob(
            token=int(result.target[row]),
            logprob=float(result.logp[row]),
            rank_ids=tuple(result.top_ids[row, :wanted].tolist()),
            rank_logprobs=tuple(result.top_logp[row, :wanted].tolist()),
        )
        for row in rows
    )
