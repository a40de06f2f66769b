"""Runs steps of every size on the model's own text and tells a cost curve what they took.

Random tokens would overstate what a step costs on a mixture of experts (they hit more distinct experts), so a private engine
writes text from a few first tokens, with draft trees of one size after another; what it wrote is the prompt of larger
steps and of longer contexts. It goes through the engine and the executor, as serving does: graphs, drafts and host included.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from runtime.clock import StepClock
from runtime.config import EngineConfig
from runtime.curve import CostCurve
from runtime.engine import Engine
from runtime.executor import Executor, begin_draft
from runtime.flight import Flight
from runtime.pages import PagePool
from runtime.speculate import Load, Root, Taps, Trees, Verified, make_draft_plan, roots_only, write_taps
from runtime.stats import EngineStats
from runtime.stream import Pushed
from runtime.tree import grow
from runtime.types import DraftTree, Emission, Request, SamplingParams

STREAMS = (1, 2, 4, 8, 16, 32, 64)
NODES = 63  # most of a stream
REPEATS = 2
PLAIN_REPEATS = 6  # S rows of S streams are cheaper than a tree of S rows (14 : 18 ms at 8, demo model), and decide if drafting pays
WARM_STEPS = 4
WARM_NODES = 3
HALF_STREAMS = 8
LONG_STREAMS = 8
LONG_CONTEXTS = (10_000, 40_000, 160_000)  # committed tokens of all streams together: one within each class of measure.CONTEXTS
ROOM = 96  # positions that a stream of a long context keeps free
PREFILL_SHARE = 0.5  # of the time left that a long context's prompts may take


class SurveyTrees:
    """Drafts for every root and verifies trees of `rows` rows in all, whatever that is worth; every step teaches the curve."""

    def __init__(self, executor: Executor, curve: CostCurve, depth: int) -> None:
        self._executor = executor
        self._clock = StepClock(curve, prompts=True)
        self.depth = depth
        self.nodes = NODES if depth else 0
        self.rows = 0
        self.heard = False  # False: warm-up, not told to the curve

    @property
    def load(self) -> Load:
        return self._clock.load

    def before_step(self, load: Load, stats: EngineStats) -> None:
        self._clock.start(load, stats)

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> Trees:
        if not self.depth:
            return partial(roots_only, roots)
        if not roots:
            write_taps(self._executor, taps, stats)
            return list
        flight = Flight(begin_draft(self._executor, make_draft_plan(roots, taps)), stats)

        def trees() -> Sequence[DraftTree]:
            logits = flight.land()
            self._clock.count_draft(len(roots), stats)
            nodes, more = divmod(max(0, self.rows - len(roots)), len(roots))
            counts = [min(nodes + (i < more), root.most or root.nodes) for i, root in enumerate(roots)]
            return grow(logits, np.array([root.token for root in roots], np.int32), counts)

        return trees

    def after_step(self, rows: int, bucket: int, verified: Mapping[str, Verified], experts: float, stats: EngineStats) -> None:
        if self.heard:
            self._clock.teach(rows, bucket, self._clock.read(stats))

    def learn(self) -> None:
        """The curve has been told."""


class Silent:
    """Text that nobody reads."""

    def push(self, tokens: Sequence[int]) -> Pushed:
        return Pushed(len(tokens), "")

    def flush(self) -> str:
        return ""


class Survey:
    """A private engine that runs until end_s (time.perf_counter()). Leaves nothing but overwritten, unreferenced cache pages.

    depth: of drafts; 0: the executor has no drafter, so plain steps and prompts alone are run.
    """

    def __init__(self, executor: Executor, config: EngineConfig, curve: CostCurve, depth: int, end_s: float) -> None:
        self._executor, self._curve, self._depth, self._end_s = executor, curve, depth, end_s
        self._config = config.replace(enable_prefix_caching=False, tpot_target_ms=None)
        self._text: list[int] = []
        self._number = 0
        self._restart()

    def run(self, edges: Iterable[int]) -> None:
        """Steps of few streams and small trees first: what is not reached is extrapolated."""
        wanted = sorted(edges)
        for streams in (s for s in STREAMS if s <= self._config.max_num_seqs):
            self._fill(streams)
            for rows in [streams, *(m for m in wanted if streams < m <= streams * (1 + self.trees.nodes))]:
                self._repeat(streams, rows, REPEATS if rows > streams else PLAIN_REPEATS)
            for lower, edge in pairwise(wanted) if streams == HALF_STREAMS and self._config.buckets else ():
                if streams < (rows := (lower + edge) // 2) <= streams * (1 + self.trees.nodes):
                    self._repeat(streams, rows, REPEATS)  # half of a bucket's dead rows: what do they cost?
        reached = max(s for s in STREAMS if s <= self._config.max_num_seqs) * (1 + self.trees.nodes)
        for rows in (m for m in wanted if m > reached):
            self._restart()
            self._prompts([rows], heard=True)
        for ctx in LONG_CONTEXTS:
            self._long(ctx, wanted)

    def _restart(self) -> None:
        self.trees = SurveyTrees(self._executor, self._curve, self._depth)
        self._engine = Engine(self._executor, self._config, lambda params: Silent(), self.trees)
        self._open = 0

    @property
    def _late(self) -> bool:
        return time.perf_counter() > self._end_s

    def _submit(self, prompt: Sequence[int]) -> None:
        vocab = self._executor.limits.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        self._engine.submit(Request(f"survey-{self._number}", np.asarray(prompt, np.int32) % vocab, params, seed=0), self._hear)
        self._number += 1
        self._open += 1

    def _hear(self, emission: Emission) -> None:
        self._text += emission.tokens
        self._open -= emission.finish is not None

    def _fill(self, streams: int) -> None:
        """Makes it so many streams that decode."""
        self.trees.heard, self.trees.rows = False, streams * (1 + WARM_NODES)
        while self._open < streams:
            self._submit([17 + 31 * self._number, 5 + 7 * self._number])
        for _ in range(WARM_STEPS):
            if not self._late:
                self._engine.step()

    def _repeat(self, streams: int, rows: int, times: int) -> None:
        for _ in range(times):
            if self._open < streams:  # some have reached the end of their context
                self._fill(streams)
            if self._late:
                return
            self.trees.heard, self.trees.rows = True, rows
            self._engine.step()

    def _prompts(self, lengths: Sequence[int], heard: bool) -> None:
        """Prompts out of the text so far, computed until all of them decode."""
        if self._late or len(self._text) < 2:
            return
        self.trees.heard, self.trees.rows = heard, 0
        for i, length in enumerate(lengths):
            self._submit(np.resize(np.roll(self._text, -97 * i), min(length, self._engine.max_model_len - 2)).tolist())
        while not self._late and self.trees.load.decoding < len(lengths) <= self._open:
            self._engine.step()

    def _long(self, ctx: int, edges: Sequence[int]) -> None:
        """Steps on contexts of `ctx` tokens together, where pages and time are enough."""
        config, limits = self._config, self._executor.limits
        each = self._engine.max_model_len - ROOM
        streams = max(LONG_STREAMS, -(-ctx // max(each, 1)))
        rows = int(edges[-1])
        prefill_s = float(self._curve.step(rows)) * ctx / rows
        pages = PagePool(config.num_pages or limits.num_pages, limits.page_size, False).capacity
        if each < 1 or streams > config.max_num_seqs or (ctx // streams + ROOM) * streams > pages * limits.page_size:
            return
        if prefill_s > PREFILL_SHARE * (self._end_s - time.perf_counter()):
            return
        self._restart()
        self._prompts([ctx // streams] * streams, heard=False)
        for rows in [streams, *(m for m in edges if streams < m <= streams * (1 + self.trees.nodes))]:
            self._repeat(streams, rows, REPEATS)
