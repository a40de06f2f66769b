"""One request inside the engine, without HTTP: order, bounds, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from runtime.types import Emission, Request, SamplingParams
from server.errors import ApiError
from server.generation import ClientGone, Generation
from server.limits import Limits
from server.record import ChoiceRecord


class Engine:
    def __init__(self, refuse_at: int = 99) -> None:
        self.callbacks: list[Callable[[Emission], None]] = []
        self.aborted: list[str] = []
        self._refuse_at = refuse_at

    def submit(self, request: Request, on_emission: Callable[[Emission], None]) -> None:
        if len(self.callbacks) == self._refuse_at:
            raise RuntimeError("full")
        self.callbacks.append(on_emission)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Heard:
    def __init__(self) -> None:
        self.gaps: list[float | None] = []
        self.ends: list[str | None] = []
        self.ended_with: list[int] = []

    def emitted(self, record: ChoiceRecord, emission: Emission, since_last_s: float | None) -> None:
        self.gaps.append(since_last_s)

    def finished(self, record: ChoiceRecord, now_s: float) -> None:
        self.ends.append(record.finish)

    def ended(self, records: Sequence[ChoiceRecord]) -> None:
        self.ended_with.append(len(records))
        assert all(record.finish is not None for record in records)


def make(engine: Engine, choices: int = 1, limits: Limits | None = None) -> tuple[Generation, Heard]:
    heard = Heard()
    requests = [Request(f"r{i}", np.array([1], np.int32), SamplingParams(), 0) for i in range(choices)]
    return Generation(engine, requests, limits or Limits(), heard), heard


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def token(text: str, finish: str | None = None, error: str | None = None) -> Emission:
    return Emission("x", (97,), text, finish=finish, error=error)


async def texts(generation: Generation) -> list[tuple[int, str]]:
    return [(index, e.text) async for batch in generation.batches() for index, e in batch]


def test_order_is_kept_and_the_end_is_the_last_choice() -> None:
    async def test() -> None:
        engine = Engine()
        generation, heard = make(engine, 2)
        generation.submit()
        for k in range(50):
            engine.callbacks[k % 2](token(str(k), "stop" if k > 47 else None))
        assert await texts(generation) == [(k % 2, str(k)) for k in range(50)]
        assert heard.ends == ["stop", "stop"] and heard.ended_with == [2], "told once, after the last"
        assert heard.gaps[:2] == [None, None]
        assert engine.aborted == []

    run(test)


def test_what_comes_after_the_end_is_ignored() -> None:
    async def test() -> None:
        engine = Engine()
        generation, heard = make(engine)
        generation.submit()
        engine.callbacks[0](token("a", "stop"))
        engine.callbacks[0](token("late"))
        assert await texts(generation) == [(0, "a")]
        assert generation.records[0].completion_tokens == 1
        assert heard.ends == ["stop"]

    run(test)


def test_closing_aborts_what_is_open_and_only_that() -> None:
    async def test() -> None:
        engine = Engine()
        generation, heard = make(engine, 3)
        generation.submit()
        engine.callbacks[1](token("a", "length"))
        await asyncio.sleep(0)
        generation.close()
        generation.close()
        assert engine.aborted == ["r0", "r2"]
        assert sorted(map(str, heard.ends)) == ["abort", "abort", "length"]
        with pytest.raises(ClientGone):
            await texts(generation)

    run(test)


def test_a_reader_that_stops_early_closes() -> None:
    async def test() -> None:
        engine = Engine()
        generation, _ = make(engine)
        generation.submit()
        engine.callbacks[0](token("a"))
        batches = generation.batches()
        assert len(await anext(batches)) == 1
        await batches.aclose()
        assert engine.aborted == ["r0"]

    run(test)


def test_the_queue_is_bounded_in_events_and_in_text() -> None:
    async def full(limits: Limits, sent: int, text: str, blocked: bool) -> bool:
        engine = Engine()
        generation, _ = make(engine, 1, limits)
        generation.submit()
        generation.write_blocked = blocked
        for _ in range(sent):
            engine.callbacks[0](token(text))
        await asyncio.sleep(0.01)
        return engine.aborted == ["r0"]

    async def test() -> None:
        few = Limits(queue_events=8, queue_events_lag=20)
        assert not await full(few, 8, "a", blocked=True)
        assert await full(few, 9, "a", blocked=True)
        assert not await full(few, 20, "a", blocked=False), "the client is not to blame for a busy server"
        assert await full(few, 21, "a", blocked=False)
        for blocked in (False, True):
            assert not await full(Limits(queue_chars=100), 10, "a" * 10, blocked)
            assert await full(Limits(queue_chars=100), 11, "a" * 10, blocked)

    run(test)


def test_a_failure_is_raised_after_what_came_before_it() -> None:
    async def test() -> None:
        engine = Engine()
        generation, heard = make(engine, 2)
        generation.submit()
        engine.callbacks[0](token("a"))
        engine.callbacks[1](token("", "error", "not finite"))
        seen = []
        with pytest.raises(ApiError, match="not finite"):
            async for batch in generation.batches():
                seen += [e.text for _, e in batch]
        assert seen == ["a", ""]
        assert engine.aborted == ["r0"]
        assert heard.ends == ["error", "error"] and heard.ended_with == [2]

    run(test)


def test_a_refusal_withdraws_those_before_it() -> None:
    async def test() -> None:
        engine = Engine(refuse_at=2)
        generation, heard = make(engine, 4)
        with pytest.raises(RuntimeError, match="full"):
            generation.submit()
        assert engine.aborted == ["r0", "r1"]
        assert heard.ends == heard.ended_with == [], "nothing began, so nothing ended"

    run(test)


def test_silence_gives_empty_batches_and_only_silence() -> None:
    async def test() -> None:
        engine = Engine()
        generation, _ = make(engine, 1, Limits(keep_alive_s=0.05))
        generation.submit()
        asyncio.get_running_loop().call_later(0.12, engine.callbacks[0], token("a"))
        asyncio.get_running_loop().call_later(0.19, engine.callbacks[0], token("b", "stop"))
        sizes = [len(batch) async for batch in generation.batches(keep_alive=True)]
        assert sizes == [0, 0, 1, 0, 1]

    run(test)
