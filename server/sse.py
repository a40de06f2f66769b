"""Server-sent events: frames, the streaming response, and watching for the client to leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, internal
from server.generation import ClientGone, Generation
from server.limits import Limits

log = logging.getLogger("server")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the stream
]
_encode = msgspec.json.Encoder().encode


def frame(value: object) -> bytes:
    """One event; NaN and infinities become null, so that the JSON is always valid."""
    return b"data: " + _encode(value) + b"\n\n"


class EventStream:
    """A streaming answer. The headers go out at once, whatever the first token takes.

    `frames` yields bytes ready to send, several events at a time where several are due. An error
    after the headers becomes an error event; the stream then still ends with `done`.
    """

    def __init__(self, generation: Generation, frames: AsyncIterator[bytes], limits: Limits, done: bytes = DONE) -> None:
        self._generation = generation
        self._frames = frames
        self._limits = limits
        self._done = done

    def translated(self, translate: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]) -> EventStream:
        """The same stream as another protocol's events, with no [DONE]; `translate` turns errors into events itself."""
        return EventStream(self._generation, translate(self._frames), self._limits, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(close_on_disconnect(receive, self._generation))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            with contextlib.suppress(ClientGone):
                async for data in self._guarded():
                    await self._write(send, data, True)
                await self._write(send, self._done, False)
        except TimeoutError:
            log.warning("a client took nothing for %.0f s and was cut off", self._limits.write_timeout_s)
        finally:
            watcher.cancel()
            self._generation.close()

    async def _write(self, send: Send, data: bytes, more: bool) -> None:
        self._generation.write_blocked = True  # a send that suspends is one the client does not take
        async with asyncio.timeout(self._limits.write_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})
        self._generation.write_blocked = False

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._frames:
                yield data
        except ClientGone:
            raise
        except ApiError as error:
            yield frame(error.body())
        except Exception:
            log.exception("a stream failed")
            yield frame(internal().body())


async def close_on_disconnect(receive: Receive, generation: Generation) -> None:
    """Returns when the client has left, after closing the generation. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()
