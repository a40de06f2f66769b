"""Measures a machine's cost curve by running it: real steps of the model's own tokens, at start-up, in about a second.

Random tokens would overstate what a step costs on a mixture of experts (they hit more distinct experts), so a private engine
writes text from a few first tokens, with draft trees of one size after another, and the times of its steps are kept.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runtime.allocate import BudgetSpeculation
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.curve import CostCurve, CurveError, CurveKey, curve_file
from runtime.engine import Engine
from runtime.executor import Executor
from runtime.speculate import Root, Taps, draft_depth, make_draft_plan
from runtime.stats import EngineStats
from runtime.stream import Pushed
from runtime.tree import grow
from runtime.types import DraftTree, Request, SamplingParams

LOG = logging.getLogger(__name__)
BUDGET_S = 2.0  # of measuring; what is not reached is extrapolated and then learned
STREAMS = (1, 2, 4, 8, 16)
NODES = (0, 1, 3, 7, 15, 31, 63)
REPEATS = 2
PLAIN_REPEATS = (
    6  # S rows of S streams are cheaper than a tree of S rows (14 against 18 ms at 8, demo model), and decide whether drafting pays
)
WARM_STEPS = 4
SHAPE = 16.0  # rows that the fixed part of a step is worth (14 for the demo model on two cores): only shapes what is not measured
DRAFT_SHAPE = 2.0  # the same for drafts, in roots
CONTEXTS = (4096, 16384, 65536, 1 << 40)  # committed tokens of all streams together


def default_buckets(most: int) -> tuple[int, ...]:
    """Edges of T where steps are launched with any M: every count to 8, then an eighth more each time, `most` at the end."""
    edges = [1]
    while edges[-1] < most:
        edges.append(min(most, edges[-1] + max(1, edges[-1] // 8)))
    return tuple(edges)


class ProbeTrees:
    """Drafts for every root and verifies trees of `count` nodes, whatever that is worth."""

    def __init__(self, executor: Executor, depth: int) -> None:
        self._executor = executor
        self.depth = depth
        self.nodes = max(NODES)
        self.count = 0
        self.draft_s = 0.0
        self.drafted = 0

    def propose(self, roots: Sequence[Root], taps: Taps, stats: EngineStats) -> list[DraftTree]:
        start = time.perf_counter()
        logits = self._executor.draft(make_draft_plan(roots, taps))
        self.draft_s, self.drafted = time.perf_counter() - start, len(roots)
        if not roots:
            return []
        return grow(logits, np.array([root.token for root in roots], np.int32), [min(self.count, root.nodes) for root in roots])


class _Silent:
    """Text that nobody reads."""

    def push(self, tokens: Sequence[int]) -> Pushed:
        return Pushed(len(tokens), "")

    def flush(self) -> str:
        return ""


def measure_curve(executor: Executor, config: EngineConfig, speculative: SpeculativeConfig, key: CurveKey) -> CostCurve:
    """Runs steps of many sizes and returns what they took. Leaves nothing behind but overwritten, unreferenced cache pages."""
    buckets = config.buckets or default_buckets(config.max_num_batched_tokens)
    seats = default_buckets(config.max_num_seqs)
    curve = CostCurve(
        buckets,
        [SHAPE + rows for rows in buckets],
        key=key,
        contexts=CONTEXTS,
        streams=seats,
        draft_s=[DRAFT_SHAPE + count for count in seats],
        note="measured at start-up on steps of the model's own tokens, then a moving mean of step times",
    )
    end_s = time.perf_counter() + BUDGET_S
    depth = draft_depth(executor, speculative)
    for streams in STREAMS:
        if streams <= config.max_num_seqs:
            _run(executor, config.replace(enable_prefix_caching=False), depth, streams, curve, end_s)
    LOG.info(
        "cost curve of %s: %s", key, ", ".join(f"{m} rows {curve.step(m) * 1e3:.1f} ms" for m in buckets[:: max(1, len(buckets) // 6)])
    )
    return curve


def _run(executor: Executor, config: EngineConfig, depth: int, streams: int, curve: CostCurve, end_s: float) -> None:
    spec = ProbeTrees(executor, depth)
    engine = Engine(executor, config, lambda params: _Silent(), spec)
    vocab = executor.limits.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for i in range(streams):
        prompt = np.array([(17 + 31 * i) % vocab, (5 + 7 * i) % vocab], np.int32)
        engine.submit(Request(f"probe-{i}", prompt, params, seed=0))
    for _ in range(WARM_STEPS):
        engine.step()
    for count in NODES:
        if streams * (1 + count) > config.max_num_batched_tokens:
            break
        spec.count = count
        for _ in range(REPEATS if count else PLAIN_REPEATS):
            if time.perf_counter() > end_s:
                return
            before, start = engine.stats(), time.perf_counter()
            engine.step()
            whole_s, after = time.perf_counter() - start, engine.stats()
            step_s = after.stage_s["verify"] - before.stage_s["verify"]
            curve.observe_step(after.rows - before.rows, 0, step_s)
            curve.observe_draft(spec.drafted, spec.draft_s)
            curve.observe_overhead(max(whole_s - step_s - spec.draft_s, 1e-9))


def find_curve(
    executor: Executor, config: EngineConfig, speculative: SpeculativeConfig, key: CurveKey, folder: Path | None
) -> tuple[CostCurve, str]:
    """The stored curve of this key if it has these buckets, else a measured one, which is stored; and where it came from."""
    path = curve_file(folder, key) if folder else None
    buckets = config.buckets or default_buckets(config.max_num_batched_tokens)
    if path is not None and path.is_file():
        try:
            curve = CostCurve.load(path, key)
            if curve.buckets.tolist() == list(buckets):
                return curve, f"read from {path}"
        except (CurveError, OSError) as error:
            LOG.warning("%s", error)
    curve = measure_curve(executor, config, speculative, key)
    if path is not None:
        try:
            curve.save(path)
        except OSError as error:
            LOG.warning("the cost curve could not be stored: %s", error)
    return curve, "measured"


def budget_speculation(
    executor: Executor, config: EngineConfig, speculative: SpeculativeConfig, model: str, tp: int, folder: Path | None, device: str = ""
) -> BudgetSpeculation:
    """The speculator of `tree_budget: auto`: finds or measures the curve of this device (this machine's CPU), model and TP."""
    curve, whence = find_curve(executor, config, speculative, CurveKey(device or device_name(), model, tp), folder)
    LOG.info("cost curve of %s: %s", curve.key, whence)
    return BudgetSpeculation(executor, speculative, curve)


def curve_folder(cache: Path | None) -> Path:
    """Where curves are kept: below RUNTIME_CACHE_DIR, else below the user's cache folder."""
    return (cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runtime") / "curves"


def device_name() -> str:
    """A name for this machine's CPU, as a key of stored curves."""
    return f"cpu-{platform.machine()}-{platform.node()}"
