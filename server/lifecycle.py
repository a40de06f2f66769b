"""A server's life: bind, load while /health says 503, serve, drain, stop.

bind ── load (own thread) ── serve ── SIGTERM: /ready 503, newcomers 503, streams end ── exit 0
                               ├── second signal: everything open gets an error event ── exit 128 + signal
                               └── engine dead: error events, /health 503 ── exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from server.app import make_app
from server.errors import ApiError
from server.report import EngineReport
from server.service import Service

if TYPE_CHECKING:
    from runtime.api import Loaded

log = logging.getLogger("server")

POLL_S = 0.05
DEAD_POLL_S = 0.25  # a dead engine is noticed within this time
FLUSH_S = 2.0  # for error events to leave, once everything open has been ended
DEAD_FLUSH_S = 1.0  # the same for a dead engine: with uvicorn's 2 s and the poll the process is gone within 4
HARD_EXIT_S = 3.0  # after a second signal the process ends by force
DEAD_EXIT_S = 4.5  # after the engine's death likewise


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and how to listen. port 0 takes a free one; keys empty: no key is asked for."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    shutdown_timeout_s: float = 60.0
    access_log: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None  # clients must show a certificate that one of these has signed
    origins: tuple[str, ...] = ()  # web origins that browsers may call from
    version: str = ""
    log_stats_s: float = 0.0  # seconds between two reports in the log; 0: none


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: it would refuse connections at once and end by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One process's HTTP server. Use: bind(), then run() on the main thread, or from a thread of your own."""

    def __init__(self, service: Service, options: ServeOptions, load: Callable[[], Loaded], on_loaded: Callable[[Loaded], object]) -> None:
        self._service = service
        self._options = options
        self._load = load
        self._on_loaded = on_loaded
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._signals: list[int] = []

    def catch_signals(self) -> None:
        """Before bind(), where the process is ours: a signal means an orderly end from when the port opens, not from when the loop runs."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._on_signal(number))

    def bind(self) -> str:
        """Takes the port and returns the URL. From here on connections wait. Raises OSError if the port is taken."""
        family = socket.AF_INET6 if ":" in self._options.host else socket.AF_INET
        # The protocol must be named: asyncio switches Nagle's algorithm off only then, and with it each first token came 40 ms late.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((self._options.host, self._options.port))
        except OSError:
            self._socket.close()
            raise
        self._socket.listen(2048)
        host = f"[{self._options.host}]" if family == socket.AF_INET6 else self._options.host
        scheme = "https" if self._options.ssl_certfile else "http"
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        """Begins the drain; from any thread, any number of times."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stopping.set)

    def run(self) -> int:
        """Serves until stopped; returns the exit code. Raises what `load` raises."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        if self._socket is None:
            self.bind()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._on_signal, number)
        if self._signals:
            self._stopping.set()
        http = _Uvicorn(self._uvicorn_config())
        serving = asyncio.create_task(http.serve([self._socket] if self._socket else None))
        try:
            code = await self._serve_until_stopped(serving)
        finally:
            http.should_exit = True
            http.force_exit = len(self._signals) > 1
            with contextlib.suppress(Exception):
                await serving
            self._service.encoders.shutdown(wait=False, cancel_futures=True)
        if self._service.loaded is not None and self._service.trouble() is None:
            self._service.loaded.engine.shutdown(0.0)  # nothing is open any more
        return code

    async def _serve_until_stopped(self, serving: asyncio.Task[None]) -> int:
        stopping = asyncio.create_task(_wait(self._stopping))
        loading = asyncio.create_task(self._load_in_thread())
        await asyncio.wait({stopping, loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return 0 if stopping.done() else 1
        self._admit(loading.result())
        watching = asyncio.create_task(self._until_dead())
        reporting = asyncio.create_task(self._report(loading.result()))
        await asyncio.wait({stopping, watching, serving}, return_when=asyncio.FIRST_COMPLETED)
        died = watching.done()
        if died:
            log.error("%s; ending every request and exiting", self._service.trouble())
            self._exit_by_force(DEAD_EXIT_S, 1)
        watching.cancel()
        stopping.cancel()
        await self._drain(0.0 if died else self._options.shutdown_timeout_s, DEAD_FLUSH_S if died else FLUSH_S)
        reporting.cancel()
        if len(self._signals) > 1:
            return 128 + self._signals[1]
        return 1 if died else 0

    async def _load_in_thread(self) -> Loaded:
        """Loads in a daemon thread: a signal meanwhile ends the process without waiting for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Loaded] = loop.create_future()

        def finish(loaded: Loaded | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            elif loaded is not None:
                done.set_result(loaded)

        def work() -> None:
            try:
                loaded, error = self._load(), None
            except BaseException as raised:
                loaded, error = None, raised
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, loaded, error)

        threading.Thread(target=work, name="load", daemon=True).start()
        return await done

    def _admit(self, loaded: Loaded) -> None:
        self._service.metrics.watch(loaded.name, loaded.engine.stats)
        self._service.loaded = loaded
        self._on_loaded(loaded)

    async def _until_dead(self) -> None:
        while self._service.trouble() is None:
            await asyncio.sleep(DEAD_POLL_S)

    async def _report(self, loaded: Loaded) -> None:
        loop, period_s = asyncio.get_running_loop(), self._options.log_stats_s
        report = EngineReport(loaded.engine.stats, loop.time())
        while period_s > 0:
            await asyncio.sleep(period_s)
            for line in report.lines(loop.time()):
                log.info("%s", line)

    async def _drain(self, timeout_s: float, flush_s: float = FLUSH_S) -> None:
        service = self._service
        service.draining = True
        if service.requests_in_flight and timeout_s:
            log.warning("draining: %d requests in flight, at most %.0f s", service.requests_in_flight, timeout_s)
        await self._until_idle(timeout_s)
        for generation in list(service.generations):
            generation.fail(ApiError(503, "the server stopped before the answer was complete"))
        await self._until_idle(flush_s, patient=True)

    async def _until_idle(self, timeout_s: float, patient: bool = False) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self._service.requests_in_flight and loop.time() < end_s and (patient or len(self._signals) < 2):
            await asyncio.sleep(POLL_S)

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self.stop()
        if len(self._signals) == 2:
            log.warning("second signal: stopping now")
            self._exit_by_force(HARD_EXIT_S, 128 + number)
        elif len(self._signals) > 2:
            os._exit(128 + number)

    def _exit_by_force(self, after_s: float, code: int) -> None:
        """Ends the process if it has not ended by then; only where the process is ours."""
        if threading.current_thread() is threading.main_thread():
            hard = threading.Timer(after_s, os._exit, (code,))
            hard.daemon = True
            hard.start()

    def _uvicorn_config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            make_app(self._service, self._options.keys, self._options.version, self._options.origins),
            http="h11",  # httptools lets headers of any size through
            h11_max_incomplete_event_size=self._service.limits.max_header_bytes,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=self._options.access_log,
            server_header=False,
            timeout_keep_alive=75,  # above the 60 s of common proxies, so that they and not we close idle connections
            timeout_graceful_shutdown=2,
            ssl_certfile=self._options.ssl_certfile,
            ssl_keyfile=self._options.ssl_keyfile,
            ssl_ca_certs=self._options.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if self._options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        if self._options.access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        return config


async def _wait(event: asyncio.Event | None) -> None:
    if event is not None:
        await event.wait()
