"""A server inside a process that is somebody else's, such as a Ray Serve replica: the application, its engine, its health."""

from __future__ import annotations

import argparse
import json
from functools import cache

from starlette.types import ASGIApp

from server.app import make_app
from server.metrics import Metrics
from server.options import load_from
from server.service import Service


class Replica:
    """A loaded model behind the routes of `server.app`. options: what `server.options.add_model_options` parses."""

    def __init__(self, options: argparse.Namespace, version: str = "") -> None:
        loaded = load_from(options)
        loaded.engine.start()
        self.service = Service(Metrics())
        self.service.metrics.watch(loaded.name, loaded.engine.stats)
        self.service.loaded = loaded
        self.app: ASGIApp = make_app(self.service, version=version)

    def check_health(self) -> None:
        """Raises RuntimeError if the engine is dead or hangs: a new replica must take this one's place."""
        if (trouble := self.service.trouble()) is not None:
            raise RuntimeError(trouble)


@cache
def open_replica(options: str, version: str = "") -> Replica:
    """This process's replica for these options, JSON: loaded once."""
    return Replica(argparse.Namespace(**json.loads(options)), version)
