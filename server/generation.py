"""One HTTP request inside the engine: submitted, heard through one bounded queue, aborted when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from runtime.types import Emission, InvalidRequest, Request
from server.errors import ApiError, from_invalid, internal
from server.limits import Limits
from server.record import ChoiceRecord


class EngineLike(Protocol):
    """The part of runtime.engine.Engine that a generation uses; every method may be called from any thread."""

    def submit(self, request: Request, on_emission: Callable[[Emission], None]) -> None: ...

    def abort(self, request_id: str) -> None: ...


class Observer(Protocol):
    """Hears every emission, every choice's end and the end of all choices, on the event loop."""

    def emitted(self, record: ChoiceRecord, emission: Emission, since_last_s: float | None) -> None: ...

    def finished(self, record: ChoiceRecord, now_s: float) -> None: ...

    def ended(self, records: Sequence[ChoiceRecord]) -> None: ...


class ClientGone(Exception):
    """The client closed its connection, or did not take what it asked for."""


Batch = list[tuple[int, Emission]]


class Generation:
    """The choices of one HTTP request.

    Emissions come from the engine's thread, hop to the event loop and wait in one bounded queue. A
    client that lets limits.queue_events x choices pile up while a write to it is blocked is cut off,
    because the memory is the server's; while nothing is blocked the event loop alone is behind, and
    much more may wait. Choices that are still open when the request ends for any reason are aborted.
    """

    def __init__(self, engine: EngineLike, requests: Sequence[Request], limits: Limits, observer: Observer) -> None:
        self._engine = engine
        self._requests = requests
        self._limits = limits
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Emission] | None] = asyncio.Queue(limits.queue_events_lag * len(requests))
        self._queued_chars = 0
        self._open: dict[int, str] = {}
        self.write_blocked = False  # set around each write to the client
        self.on_closed: Callable[[Generation], object] | None = None
        self._ended: Exception | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._expiring: asyncio.TimerHandle | None = None
        now_s = self._heard_s = self._loop.time()
        self.records = [ChoiceRecord(len(request.prompt), now_s, request.arrived_s) for request in requests]

    def submit(self) -> None:
        """Hands every choice to the engine. All are admitted or none: a refusal aborts those before it and is raised on."""
        for index, request in enumerate(self._requests):
            try:
                self._engine.submit(request, self._hop(index))
            except Exception as error:
                self._withdraw()
                if isinstance(error, InvalidRequest):
                    raise from_invalid(error) from None
                raise
            self._open[index] = request.id
        if self._limits.request_timeout_s > 0:
            self._expiring = self._loop.call_later(self._limits.request_timeout_s, self._expire)

    def _expire(self) -> None:
        if self._open:
            self.fail(ApiError(504, f"the request was not finished within the {self._limits.request_timeout_s:g} s that it had"))

    def _withdraw(self) -> None:
        for request_id in self._open.values():
            self._engine.abort(request_id)
        self._open.clear()

    async def batches(self, *, keep_alive: bool = False) -> AsyncIterator[Batch]:
        """What has arrived, in order, until every choice has finished.

        With keep_alive an empty batch tells of limits.keep_alive_s of silence. Raises ApiError if the
        request failed, ClientGone if its client left or was too slow.
        """
        if keep_alive:
            self._beat()
        try:
            while self._open or self._ended or not self._queue.empty():
                batch = await self._next()
                if batch and not isinstance(self._ended, ClientGone):
                    yield batch
                if self._ended is not None:
                    raise self._ended
                if not batch:
                    yield batch
        finally:
            self.close()

    async def _next(self) -> Batch:
        item = await self._queue.get()
        batch: Batch = []
        while True:
            if item is not None:
                batch.append(item)
            try:
                item = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                break
        self._queued_chars = 0
        return batch

    def close(self) -> None:
        """Aborts what is still open; idempotent."""
        self._end(ClientGone())

    def fail(self, error: ApiError) -> None:
        """Ends the request with an error that its client still gets to see."""
        self._end(error)

    def _end(self, error: Exception) -> None:
        if self._ended is None:
            self._ended = error
        for timer in (self._beating, self._expiring):
            if timer is not None:
                timer.cancel()
        if self.on_closed is not None:
            self.on_closed(self)
        now_s = self._loop.time()
        for index, request_id in self._open.items():
            self._engine.abort(request_id)
            record = self.records[index]
            record.finish = "abort" if isinstance(error, ClientGone) else "error"
            self._observer.finished(record, now_s)
        if self._open:
            self._observer.ended(self.records)
        self._open.clear()
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(None)  # a full queue wakes its reader by itself

    def _beat(self) -> None:
        """Wakes the reader with an empty batch once the engine has been silent for keep_alive_s."""
        period_s = self._limits.keep_alive_s
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= period_s and self._queue.empty():
            self._heard_s += silent_s
            silent_s = 0.0
            self._queue.put_nowait(None)
        self._beating = self._loop.call_later(max(period_s - silent_s, 0.01), self._beat)

    def _hop(self, index: int) -> Callable[[Emission], None]:
        def hop(emission: Emission) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver, index, emission)

        return hop

    def _deliver(self, index: int, emission: Emission) -> None:
        if index not in self._open:
            return
        now_s = self._loop.time()
        record = self.records[index]
        since_last_s = now_s - record.last_s if record.first_s is not None else None
        record.observe(emission, now_s)
        self._observer.emitted(record, emission, since_last_s)
        if emission.finish is not None:
            del self._open[index]
            self._observer.finished(record, now_s)
            if not self._open:
                self._observer.ended(self.records)
        self._heard_s = now_s
        self._queued_chars += len(emission.text)
        if self._overflows():
            self._end(ClientGone())
            return
        self._queue.put_nowait((index, emission))
        if emission.error is not None:
            self.fail(internal(emission.error))

    def _overflows(self) -> bool:
        waiting, choices = self._queue.qsize(), len(self._requests)
        events = self._limits.queue_events if self.write_blocked else self._limits.queue_events_lag
        return waiting >= events * choices or self._queued_chars > self._limits.queue_chars * choices
