"""A machine's cost curve: measured at start-up by running real steps (`runtime.survey`), stored, found again."""

from __future__ import annotations

import logging
import os
import platform
import time
from pathlib import Path

from runtime.allocate import BudgetSpeculation, TimedDecoding
from runtime.config import EngineConfig, SpeculativeConfig
from runtime.curve import CostCurve, CurveKey, curve_file
from runtime.executor import Captures, Executor
from runtime.learned import CurveError
from runtime.pace import Pace
from runtime.speculate import draft_depth
from runtime.survey import Survey

LOG = logging.getLogger(__name__)
BUDGET_S = 2.0  # of measuring; what is not reached is extrapolated and then learned
CAPTURED_BUDGET_S = 12.0  # the same where steps are graphs, of fixed sizes: every edge, and long contexts
SHAPE = 16.0  # rows that the fixed part of a step is worth (14 for the demo model on two cores): only shapes what is not measured
DRAFT_SHAPE = 2.0  # the same for drafts, in roots
CONTEXTS = (4096, 16384, 65536, 1 << 40)  # committed tokens of all streams together


def default_buckets(most: int) -> tuple[int, ...]:
    """Edges of T where steps are launched with any M: every count to 8, then an eighth more each time, `most` at the end."""
    edges = [1]
    while edges[-1] < most:
        edges.append(min(most, edges[-1] + max(1, edges[-1] // 8)))
    return tuple(edges)


def measure_curve(executor: Executor, config: EngineConfig, speculative: SpeculativeConfig, key: CurveKey) -> CostCurve:
    """Runs steps of many sizes and returns what they took: T at every bucket that is launched, T_d by streams, the host."""
    buckets = config.buckets or default_buckets(config.max_num_batched_tokens)
    seats = fit_seats(config)
    curve = CostCurve(
        buckets,
        [SHAPE + rows for rows in buckets],
        key=key,
        contexts=CONTEXTS,
        streams=seats,
        draft_s=[DRAFT_SHAPE + count for count in seats],
        note="measured at start-up on steps of the model's own tokens, then a moving mean of step times",
    )
    captured = isinstance(executor, Captures)
    end_s = time.perf_counter() + (CAPTURED_BUDGET_S if captured else BUDGET_S)
    depth = draft_depth(executor, speculative) if speculative.enabled else 0
    Survey(executor, config, curve, depth, end_s).run(buckets if captured else powers(buckets))
    curve.share_shape()
    LOG.info(
        "cost curve of %s: %s", key, ", ".join(f"{m} rows {curve.step(m) * 1e3:.1f} ms" for m in buckets[:: max(1, len(buckets) // 6)])
    )
    return curve


def fit_seats(config: EngineConfig) -> tuple[int, ...]:
    """Edges of T_d: the sizes of captured drafts are those of steps, up to the seats; any number where none is captured."""
    if not config.buckets:
        return default_buckets(config.max_num_seqs)
    return (*(m for m in config.buckets if m < config.max_num_seqs), config.max_num_seqs)


def powers(edges: tuple[int, ...]) -> list[int]:
    """Edges about a factor of two apart, the last one among them: where every M has a time of its own, all would take too long."""
    chosen: list[int] = []
    for edge in edges:
        if not chosen or edge >= 2 * chosen[-1] or edge == edges[-1]:
            chosen.append(edge)
    return chosen


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
) -> tuple[BudgetSpeculation | TimedDecoding, Pace | None]:
    """The speculator of `tree_budget: auto`, or of a latency target without drafts, and what holds the target.

    Finds or measures the curve of this device ("": this machine's CPU), model and TP.
    """
    curve, whence = find_curve(executor, config, speculative, CurveKey(device or device_name(), model, tp), folder)
    LOG.info("cost curve of %s: %s", curve.key, whence)
    target_s = None if config.tpot_target_ms is None else config.tpot_target_ms / 1e3
    if not speculative.enabled:
        return TimedDecoding(curve), None if target_s is None else Pace(target_s, curve)
    budget = BudgetSpeculation(executor, speculative, curve)
    return budget, None if target_s is None else Pace(target_s, curve, budget.outlook)


def curve_folder(cache: Path | None) -> Path:
    """Where curves are kept: below RUNTIME_CACHE_DIR, else below the user's cache folder."""
    return (cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runtime") / "curves"


def device_name() -> str:
    """A name for this machine's CPU, as a key of stored curves."""
    return f"cpu-{platform.machine()}-{platform.node()}"
