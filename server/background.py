"""A server in a thread of this process, for tools that want one of their own for a while."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from server.lifecycle import HttpServer, ServeOptions
from server.metrics import Metrics
from server.record import SpecDetail
from server.service import Service

if TYPE_CHECKING:
    from runtime.api import Loaded


class BackgroundServer:
    """`with BackgroundServer(load) as server:` serves what `load` returns at server.url, until the block ends.

    load() runs in the server's own loading thread and returns a stopped engine, which is started.
    Entering waits for it and raises what it raised.
    """

    def __init__(self, load: Callable[[], Loaded], spec_detail: SpecDetail = "detailed", port: int = 0) -> None:
        self._load = load
        self._outcome: queue.Queue[Loaded | BaseException] = queue.Queue()
        self.service = Service(Metrics(), spec_detail=spec_detail)
        self._http = HttpServer(self.service, ServeOptions(port=port, shutdown_timeout_s=1.0), self._start_engine, self._outcome.put)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.url = ""

    def __enter__(self) -> BackgroundServer:
        self.url = self._http.bind()
        self._thread.start()
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            self._thread.join()
            raise outcome
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.stop()
        self._thread.join(30.0)

    def _start_engine(self) -> Loaded:
        loaded = self._load()
        loaded.engine.start()
        return loaded

    def _run(self) -> None:
        try:
            self._http.run()
        except BaseException as error:
            self._outcome.put(error)
