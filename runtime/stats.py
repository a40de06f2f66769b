"""What an engine counts: the source of /metrics, of logs and of bench reports."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runtime.curve import find_threshold
from runtime.nvtx import Ranges
from runtime.trace import StepTrace

STAGES = ("draft", "grow", "plan", "verify", "accept", "emit")  # of one step, in order; the names in logs, metrics, traces and NVTX
FINISHES = ("stop", "length", "abort", "error")
EMA_STEPS = 32  # steps over which step_ms_ema forgets
SURE_STEPS = 8  # steps of a group of rows before its mean time says anything about the threshold

BUDGET_STEPS = 256  # latest records that stats hold


@dataclass(frozen=True, slots=True)
class BudgetStep:
    """What one step under a chosen node budget was expected to do and did."""

    rows: int  # live
    bucket: int  # M launched
    nodes: tuple[int, ...]  # verified, of each decoding sequence, root not counted
    drafted: int  # sequences drafted for; 0: no draft was made
    expected: float  # tokens, roots' included
    realised: int  # tokens drawn along accepted paths
    expected_s: float
    step_s: float
    experts: float = 0.0  # distinct ones that a layer hit, mean over layers; 0: not counted


class Stage:
    """A block that is timed. Nine a step, so a class: a generator takes longer."""

    __slots__ = ("_flown_s", "_name", "_start_s", "_stats")

    def __init__(self, stats: EngineStats, name: str) -> None:
        self._stats, self._name = stats, name

    def __enter__(self) -> None:
        stats = self._stats
        self._start_s = start_s = time.perf_counter()
        self._flown_s = stats.flown_by(start_s)
        if stats.ranges is not None:
            stats.ranges.push(self._name)

    def __exit__(self, *failure: object) -> None:
        stats, name = self._stats, self._name
        if stats.ranges is not None:
            stats.ranges.pop()
        end_s = time.perf_counter()
        took_s = end_s - self._start_s
        stats.stage_s[name] += took_s
        stats.exposed_s[name] += took_s - (stats.flown_by(end_s) - self._flown_s)
        if stats.trace is not None:
            stats.trace.span(name, self._start_s, end_s)


@dataclass(slots=True)
class EngineStats:
    """Counters since start (they never fall), gauges of now, and times by stage.

    The engine's thread alone writes; `Engine.stats()` hands out copies made between two steps.
    """

    running: int = 0
    waiting: int = 0
    seats: int = 0  # sequences that may run now: fewer than max_num_seqs under a latency target
    pages_total: int = 0  # that sequences can hold: the null page is not counted
    pages_used: int = 0  # held by sequences
    pages_kept: int = 0  # free for use, content kept for prefix hits
    steps: int = 0
    rows: int = 0  # live rows of all steps
    prompt_tokens: int = 0  # of requests that were admitted
    generation_tokens: int = 0  # emitted, after the cut at a stop or limit
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there
    preemptions: int = 0
    drafts: int = 0  # trees verified that had a node besides the root
    draft_tokens: int = 0  # nodes verified, roots not counted
    accepted_tokens: int = 0  # draft nodes accepted and emitted
    accepted_per_position: list[int] = field(default_factory=list)  # drafts that accepted depth d + 1
    accepted_per_rank: Counter[int] = field(default_factory=Counter)  # accepted nodes by place among their siblings, 0 the likeliest
    bucket_steps: Counter[int] = field(default_factory=Counter)  # steps launched with M
    bucket_s: dict[int, float] = field(default_factory=dict)  # wall time of those steps
    finished: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FINISHES, 0)))
    rejected: int = 0  # submissions refused for a full queue
    corrupted_requests: int = 0  # ended by a non-finite row
    callback_errors: int = 0  # on_emission calls that raised
    budget_steps: int = 0  # steps whose node budget was chosen by expected tokens over time
    skipped_drafts: int = 0  # of these, steps where no draft was made
    expected_tokens: float = 0.0  # of these, beforehand
    realised_tokens: int = 0  # of these, in fact
    budget_records: deque[BudgetStep] = field(default_factory=lambda: deque(maxlen=BUDGET_STEPS))  # the latest
    step_ms_ema: float = 0.0
    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # wall time summed over steps
    exposed_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # of it, while nothing was in flight
    bucket_exposed_s: dict[int, float] = field(default_factory=dict)  # of bucket_s likewise, what lies between the stages included
    flown_s: float = 0.0  # drafts and steps in flight: handed over, and not yet seen to be done
    late_flights: int = 0  # of these, done before the host came to wait: counted as having been short, so exposed_s is a bound
    experts_total: int = 0  # of a mixture-of-experts layer; 0: not known
    experts: float = 0.0  # distinct ones that a layer hit in the last step, mean over layers; 0: not counted
    experts_sum: float = 0.0  # of the same over all steps that counted them
    experts_steps: int = 0
    progress: int = 0  # positions computed for the first time, tokens delivered, requests ended: never still while the engine lives
    trace: StepTrace | None = field(default=None, repr=False, compare=False)  # hears of every stage and step
    ranges: Ranges | None = field(default=None, repr=False, compare=False)  # likewise, for a profiler
    _up_since_s: float | None = field(default=None, repr=False, compare=False)  # what is in flight took off then

    def copy(self) -> EngineStats:
        return dataclasses.replace(
            self,
            accepted_per_position=list(self.accepted_per_position),
            accepted_per_rank=Counter(self.accepted_per_rank),
            bucket_steps=Counter(self.bucket_steps),
            bucket_s=dict(self.bucket_s),
            finished=Counter(self.finished),
            stage_s=dict(self.stage_s),
            exposed_s=dict(self.exposed_s),
            bucket_exposed_s=dict(self.bucket_exposed_s),
            budget_records=self.budget_records.copy(),
        )

    @property
    def kv_cache_usage(self) -> float:
        return self.pages_used / self.pages_total if self.pages_total else 0.0

    @property
    def threshold(self) -> int | None:
        """Rows from which further ones are cheap, by the times of the steps so far; None: not within what was run."""
        known = [rows for rows, steps in by_power(self.bucket_steps).items() if steps >= SURE_STEPS]
        steps, seconds = by_power(self.bucket_steps), by_power(self.bucket_s)
        return find_threshold(known, [seconds[rows] / steps[rows] for rows in known])

    def stage(self, name: str) -> Stage:
        """Adds the wall time of the block to stage `name`, one of STAGES, and to what was exposed what nothing in flight hid."""
        return Stage(self, name)

    @property
    def in_flight(self) -> bool:
        return self._up_since_s is not None

    def take_off(self) -> None:
        """A plan was handed to the device."""
        self._up_since_s = time.perf_counter()

    def land(self, late: bool = False) -> None:
        """It is done; late: it was so before anybody looked, so that the device may have idled since the take-off."""
        if self._up_since_s is not None and not late:
            self.flown_s += time.perf_counter() - self._up_since_s
        self.late_flights += late
        self._up_since_s = None

    def flown_by(self, now_s: float) -> float:
        """Seconds in flight up to time.perf_counter() `now_s`, what is under way included."""
        return self.flown_s if self._up_since_s is None else self.flown_s + now_s - self._up_since_s

    def count_step(
        self, bucket: int, rows: int, step_s: float, experts: float = 0.0, streams: int = 0, prompt: int = 0, flown_s: float = 0.0
    ) -> None:
        """Counts a step launched with M = bucket; experts: distinct ones that a layer hit, 0 where nobody counts them.

        streams: sequences that decoded; prompt: rows of chunks; the other rows are draft nodes. flown_s: of step_s, in flight.
        """
        self.steps += 1
        self.experts = experts
        if experts:
            self.experts_sum += experts
            self.experts_steps += 1
        self.rows += rows
        self.bucket_steps[bucket] += 1
        self.bucket_s[bucket] = self.bucket_s.get(bucket, 0.0) + step_s
        self.bucket_exposed_s[bucket] = self.bucket_exposed_s.get(bucket, 0.0) + step_s - flown_s
        weight = 1.0 / min(self.steps, EMA_STEPS)
        self.step_ms_ema += weight * (step_s * 1e3 - self.step_ms_ema)
        if self.trace is not None:
            end = time.perf_counter()
            host_us = round((step_s - flown_s) * 1e6, 1)  # while nothing was in flight
            args: dict[str, float] = {"number": self.steps, "M": bucket, "rows": rows, "streams": streams, "prompt": prompt}
            args |= {"tokens": self.generation_tokens, "host_us": host_us}
            self.trace.span("step", end - step_s, end, **args, **({"experts": round(experts, 2)} if experts else {}))
            self.trace.count("rows", end - step_s, rows=rows)
            if experts:
                self.trace.count("experts", end - step_s, experts=round(experts, 2))

    def count_budget(self, step: BudgetStep) -> None:
        self.budget_steps += 1
        self.skipped_drafts += not step.drafted
        self.expected_tokens += step.expected
        self.realised_tokens += step.realised
        self.budget_records.append(step)

    def count_draft(self, nodes: int, accepted: int, ranks: Iterable[int] = ()) -> None:
        """Counts a verified tree; ranks: of its accepted nodes among their siblings."""
        self.drafts += 1
        self.accepted_per_rank.update(ranks)
        self.draft_tokens += nodes
        self.accepted_tokens += accepted
        if len(self.accepted_per_position) < accepted:
            self.accepted_per_position.extend([0] * (accepted - len(self.accepted_per_position)))
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1


def by_power(values: Mapping[int, float]) -> dict[int, float]:
    """Sums over rows rounded up to a power of two: about 20 keys at most, whatever row counts the steps had."""
    grouped: dict[int, float] = {}
    for rows, value in values.items():
        power = 1 << (rows - 1).bit_length() if rows > 0 else 0
        grouped[power] = grouped.get(power, 0.0) + value
    return dict(sorted(grouped.items()))
