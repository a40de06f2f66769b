"""The engine: requests in from any thread, one step after another in its own, emissions out.

Whatever one request does ends that request alone. What the executor does to one step ends them all:
its state is unknown then, so every open request gets an error and the engine stays dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from runtime.config import EngineConfig
from runtime.cycle import Cycle, Delivery
from runtime.env import load_env
from runtime.executor import Captures, Executor, Overlaps, Watched
from runtime.lives import RankFailed
from runtime.nvtx import find_ranges
from runtime.pace import Pace
from runtime.pages import PagePool
from runtime.scheduler import Scheduler
from runtime.sequence import OnEmission, Sequence, Stream
from runtime.speculate import NoSpeculation, Speculator
from runtime.stats import EngineStats
from runtime.trace import StepTrace
from runtime.types import Emission, InvalidRequest, Request, SamplingParams

LOG = logging.getLogger(__name__)
ENGINE_FAILED = "the engine has failed; the request was not completed"


class Refused(RuntimeError):
    """The engine takes no request now; another replica, or this one later, may."""


class QueueFull(Refused):
    """As many requests wait as may wait."""


class ShuttingDown(Refused):
    """The engine finishes what it has and takes nothing new."""


class EngineDead(RuntimeError):
    """A step failed, and no further one will run; the cause is chained and in `Engine.dead`."""


class Engine:
    """Continuous batching with speculation over one executor.

    Call `step` from one thread, or `start` a thread that does; submit, abort, stats and check_health may
    be called from any. Emissions of a request go to its on_emission, in order, from the stepping
    thread; the last one carries `finish`. In a thread of its own the engine hands out what a step says once the next one
    is on its way, if the executor overlaps and there is a next one. The executor is closed by whoever made it.

    make_stream gets the request's parameters with max_tokens clamped to the context. eos_ids are
    the ids that min_tokens holds back. pace lowers seats and prompt chunks for a latency target.
    Raises ValueError where config and executor disagree.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        make_stream: Callable[[SamplingParams], Stream],
        speculator: Speculator | None = None,
        *,
        eos_ids: Iterable[int] = (),
        pace: Pace | None = None,
    ) -> None:
        limits = executor.limits
        if config.block_size != limits.page_size:
            raise ValueError(f"engine config: block_size is {config.block_size}, the executor has {limits.page_size}; make them equal")
        num_pages = config.num_pages or limits.num_pages
        rows = config.max_num_batched_tokens
        for name, wanted, built in (("num_pages", num_pages, limits.num_pages), ("max_num_batched_tokens", rows, limits.max_rows)):
            if wanted > built:
                raise ValueError(f"engine config: {name} is {wanted}, the executor was built for {built}; lower one or raise the other")
        pool = PagePool(num_pages, limits.page_size, config.enable_prefix_caching)
        # No request outgrows the pages, so every admitted one fits alone: draft nodes stay inside max_model_len too.
        self.max_model_len = min(config.max_model_len or limits.max_positions, limits.max_positions, pool.capacity * limits.page_size)
        self.executor, self.config = executor, config  # as given: a bench puts other engines over the same executor
        self.speculator: Speculator = speculator or NoSpeculation()
        self.dead: BaseException | None = None
        self._most_open = config.max_num_seqs + config.max_num_queued_reqs
        self._config, self._limits, self._make_stream, self._eos_ids = config, limits, make_stream, frozenset(eos_ids)
        ranges = find_ranges() if load_env().nvtx else None
        self._stats = EngineStats(pages_total=pool.capacity, experts_total=limits.experts, ranges=ranges)
        self._scheduler = Scheduler(
            pool,
            self._stats,
            max_seqs=config.max_num_seqs,
            max_rows=config.max_num_batched_tokens,
            max_len=self.max_model_len,
            last_draftable=limits.max_positions - 1 - limits.draft_depth,
        )
        self._watched = executor if isinstance(executor, Watched) else None
        self._captures = executor if isinstance(executor, Captures) else None
        self._overlaps = isinstance(executor, Overlaps)
        self._cycle = Cycle(executor, self.speculator, self._scheduler, config, self._stats, pace)
        self._wake = threading.Condition()  # guards the five fields below
        self._open: dict[str, Sequence] = {}
        self._inbox: list[Sequence] = []
        self._aborts: set[str] = set()
        self._closing = False
        self._published = self._stats.copy()
        self._stepping = threading.RLock()  # entered a second time by its own thread only from on_emission, which is refused
        self._inside = False
        self._emitted: list[Emission] = []  # since the last call of _advance began
        self._thread: threading.Thread | None = None
        self._last_step_s = self._last_progress_s = time.monotonic()
        self._seen_progress = 0

    def check(self, request: Request) -> None:
        """Raises InvalidRequest naming the field if the request can not be served as it stands."""
        self._clamp(request)

    def submit(self, request: Request, on_emission: OnEmission | None = None) -> None:
        """Queues a request; raises InvalidRequest, QueueFull, ShuttingDown or EngineDead, and then nothing is queued."""
        params = self._clamp(request)
        sequence = Sequence(request, params, self._make_stream(params), self._limits.page_size, on_emission, self._eos_ids)
        with self._wake:
            if self.dead is not None:
                raise EngineDead(ENGINE_FAILED) from self.dead
            if self._closing:
                raise ShuttingDown("the engine is shutting down")
            if request.id in self._open:
                raise InvalidRequest("id", f"{request.id!r} is the id of an open request")
            if self.full:
                self._stats.rejected += 1
                raise QueueFull(f"{len(self._open)} requests run or wait, {self._most_open} may; try again later")
            self._check_queued_tokens(sequence.prompt_len)
            if not self._open:
                self._last_step_s = self._last_progress_s = time.monotonic()  # idle until now is not a hang
            self._open[request.id] = sequence
            self._inbox.append(sequence)
            self._wake.notify_all()

    @property
    def full(self) -> bool:
        """Whether submit would raise QueueFull now; true of this moment alone."""
        return len(self._open) >= self._most_open

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step, with a last emission of finish "abort". Unknown ids are passed over."""
        with self._wake:
            if request_id in self._open:
                self._aborts.add(request_id)
                self._wake.notify_all()

    def step(self, ahead: bool = False) -> list[Emission]:
        """Takes in what was submitted and aborted, runs one step if anything is due, and returns all emissions.

        ahead: as the engine's own thread does it, what a step says is returned by the call after it, while the next one is in flight.

        If the step fails, every open request gets an emission of finish "error"; calls after that
        raise EngineDead.
        """
        if self._thread is not None:
            raise RuntimeError("the engine steps in its own thread since start(); do not call step()")
        return self._advance(ahead)

    def start(self) -> None:
        """Starts the stepping thread; it sleeps while nothing is open."""
        if self._thread is not None:
            raise RuntimeError("the engine has been started already")
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def shutdown(self, timeout_s: float = 60.0) -> bool:
        """Takes nothing new, finishes what runs and waits, and after timeout_s aborts the rest.

        May be called again, from another thread too, with a shorter time. False if a step hangs: then
        requests are still open, and only the end of the process frees them.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("shutdown waits for the engine's thread and can not be called from it, so not from on_emission")
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._drain(timeout_s)
        with self._wake:
            self._aborts.update(self._open)
            self._wake.notify_all()
        self._drain(self._config.step_deadline_s)
        return not self._open

    def stats(self) -> EngineStats:
        """The counters as of the last finished step, and how many requests wait now."""
        with self._wake:
            stats = self._published.copy()
            stats.waiting = max(0, len(self._open) - stats.running)
            stats.rejected = self._stats.rejected
            return stats

    def capture(self, buckets: Iterable[int] | None = None) -> int:
        """Captures the steps of these buckets (None: all) as graphs, between two steps; how many graphs there are then.

        0 where the executor has none. Raises ValueError naming a bucket that it was not built for.
        """
        with self._stepping:
            return self._captures.capture(buckets) if self._captures is not None else 0

    def trace_to(self, trace: StepTrace | None) -> None:
        """From the next stage on every stage and step is written to `trace`, which stays the caller's to close; None ends that."""
        self._stats.trace = trace

    def check_health(self) -> str | None:
        """Why the engine should be taken out of service, or None.

        It is dead, or for step_deadline_s no step has finished, or none of those that did moved anything: no position was
        computed that had not been before, no token delivered, no request ended.
        """
        if self.dead is not None:
            return f"{ENGINE_FAILED}: {self.dead if isinstance(self.dead, RankFailed) else type(self.dead).__name__}"
        if self._watched is not None and (trouble := self._watched.trouble()) is not None:
            return f"{ENGINE_FAILED}: {trouble}"
        with self._wake:
            if not self._open:
                return None
            now_s, limit = time.monotonic(), self._config.step_deadline_s
            for since_s, what in (
                (self._last_step_s, "no step has finished"),
                (self._last_progress_s, "steps finish without any progress"),
            ):
                if now_s - since_s > limit:
                    return f"{what} for {now_s - since_s:.0f} s (limit {limit:g} s), {len(self._open)} requests are open"
        return None

    def _clamp(self, request: Request) -> SamplingParams:
        """Checks a request; returns its parameters with max_tokens cut to the context left."""
        length = _check_prompt(request.prompt, self._limits.vocab_size)
        if length >= self.max_model_len:
            raise InvalidRequest("prompt", f"{length} tokens leave no room for an output within the context of {self.max_model_len} tokens")
        params = request.sampling
        if params.n != 1:
            raise InvalidRequest("n", f"{params.n} choices in one engine request; submit one request for each")
        if not 0 <= request.seed < 2**64:
            raise InvalidRequest("seed", f"{request.seed} is not in [0, 2^64)")
        if params.priority and self._config.scheduling_policy == "fcfs":
            raise InvalidRequest("priority", f"{params.priority}, but requests are served as they arrive; use scheduling_policy 'priority'")
        params.check_tokens(self._limits.vocab_size)
        left = self.max_model_len - length
        return params.replace(max_tokens=left if params.max_tokens is None else min(params.max_tokens, left))

    def _check_queued_tokens(self, more: int) -> None:
        """Raises QueueFull if too many prompt tokens would wait. Whoever finds nobody waiting may be of any length."""
        limit = self._config.max_num_queued_tokens
        waiting = 0 if limit is None else sum(s.prompt_len for s in self._open.values() if not s.admitted_s)
        if limit is not None and waiting and waiting + more > limit:
            self._stats.rejected += 1
            raise QueueFull(f"{waiting} prompt tokens wait, and {more} more are above the limit of {limit}; try again later")

    def _loop(self) -> None:
        while self.dead is None:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._aborts or self._scheduler.has_work or self._closing)
                if self._closing and not self._open:
                    return
            self._advance(ahead=self._overlaps)

    def _drain(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
            return
        deadline = time.monotonic() + timeout_s
        while self._open and self.dead is None and time.monotonic() < deadline:
            self._advance()

    def _advance(self, ahead: bool = False) -> list[Emission]:
        """One step; what was emitted meanwhile. ahead: what this step says may wait until the next one is on its way."""
        with self._stepping:
            if self.dead is not None:
                raise EngineDead(ENGINE_FAILED) from self.dead
            if self._inside:
                raise RuntimeError("step() was called from on_emission, in the middle of a step")
            self._emitted = []
            self._inside = True
            try:
                self._deliver(self._take_in())
                if self._scheduler.has_work:
                    self._cycle.run(self._tell)
                if not (ahead and self._scheduler.has_work):
                    self._tell()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._inside = False
                self._note_step()
            return self._emitted

    def _tell(self) -> None:
        """Hands out what the last step said, and the counters with it."""
        with self._stats.stage("emit"):
            self._deliver(self._cycle.tell())
            self._publish()

    def _take_in(self) -> list[Delivery]:
        """Moves submissions to the queue and ends aborted requests, once they have heard all that was said before."""
        with self._wake:
            if not (self._inbox or self._aborts):
                return []
            arrived, aborted = self._inbox, [self._open[id] for id in self._open if id in self._aborts]
            self._inbox, self._aborts = [], set()
        for sequence in arrived:
            self._scheduler.add(sequence)
        if aborted:
            self._tell()
            aborted = [sequence for sequence in aborted if self._open.get(sequence.id) is sequence]
        deliveries: list[Delivery] = []
        for sequence in aborted:
            self._scheduler.remove(sequence)
            self._stats.finished["abort"] += 1
            self._stats.progress += 1
            cached, admitted_s = sequence.cached_tokens or 0, sequence.admitted_s
            emission = Emission(sequence.id, (), sequence.flush(), finish="abort", cached_tokens=cached, admitted_s=admitted_s)
            deliveries.append((sequence, emission))
        return deliveries

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Calls the listeners. One that raises has nobody behind it: its request is aborted, the engine goes on."""
        for sequence, emission in deliveries:
            self._emitted.append(emission)
            if emission.finish is not None:
                with self._wake:
                    del self._open[sequence.id]
                    self._aborts.discard(sequence.id)  # it must not reach a later request of the same id
            if sequence.on_emission is None:
                continue
            try:
                sequence.on_emission(emission)
            except Exception:
                LOG.exception("request %s: on_emission failed", sequence.id)
                self._stats.callback_errors += 1
                self.abort(sequence.id)

    def _fail(self, error: BaseException) -> None:
        """Marks the engine dead and ends every open request with an error, after what was still to be told."""
        LOG.error("the engine has failed", exc_info=error)
        self._stats.land(late=True)
        self._deliver(self._cycle.tell())
        with self._wake:
            self.dead = error
            lost = list(self._open.values())
        self._stats.finished["error"] += len(lost)
        self._deliver([(sequence, Emission(sequence.id, (), "", finish="error", error=ENGINE_FAILED)) for sequence in lost])
        self._publish()

    def _publish(self) -> None:
        pool, stats = self._scheduler.pool, self._stats
        stats.running = len(self._scheduler.running) if self.dead is None else 0
        stats.pages_used, stats.pages_kept, stats.seats = pool.held, pool.kept, self._scheduler.seats
        with self._wake:
            self._published = stats.copy()

    def _note_step(self) -> None:
        """What `check_health` looks at."""
        with self._wake:
            self._last_step_s = time.monotonic()
            if self._stats.progress != self._seen_progress:
                self._seen_progress, self._last_progress_s = self._stats.progress, self._last_step_s


def _check_prompt(prompt: object, vocab_size: int) -> int:
    """The number of tokens of a prompt; InvalidRequest unless it is a non-empty row of ids in [0, vocab_size)."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size == 0:
        raise InvalidRequest("prompt", f"want at least one token in one dimension, got shape {list(ids.shape)}")
    if ids.dtype.kind not in "iu":
        raise InvalidRequest("prompt", f"token ids must be integers, not {ids.dtype}")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise InvalidRequest("prompt", f"token id {int(ids[bad[0]])} at place {int(bad[0])} is outside the vocabulary [0, {vocab_size})")
    return len(ids)
