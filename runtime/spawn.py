"""Ranks 1 and up, or the first ranks of other stages, as child processes: `python -m runtime.rank`, a job in JSON on stdin, a
private pipe back.

Not multiprocessing: that imports the user's main script again in every child, and pickles. A child inherits the environment,
ignores the terminal's Ctrl-C and the service manager's SIGTERM (rank 0 drains first), and dies with rank 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.config import EngineConfig, SpeculativeConfig
from runtime.lives import RankEvent
from runtime.load_config import FROM_FILES, LoadConfig

ROOT = Path(__file__).parent.parent
READY = b"ready\n"  # the pipe's first line; what went wrong may follow, the pipe's end is the process's
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank needs to know beyond the plans; travels as JSON.

    rank, world: in its stage's tensor-parallel group; device: of the stage's first rank on its host. Rank 0 of a stage above 0 finds
    stage 0 at host and port, and shows the token there.
    """

    rank: int
    world: int
    parent: int  # process id of rank 0; 0: another host process watches over this one
    model: str
    backend: str
    activations: str
    config: EngineConfig
    speculative: SpeculativeConfig
    block: str = ""  # path of the shared block, which the group makes
    weights: LoadConfig = FROM_FILES
    stage: int = 0
    stages: int = 1
    device: int = 0
    host: str = ""
    port: int = 0
    token: str = field(default="", repr=False)
    group: str = ""  # Ray's name of the placement group that holds a place for it; "": it makes its own

    @property
    def number(self) -> int:
        """What it is called by who started it: a stage above 0 is started by its first rank."""
        return self.rank or self.stage

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> RankJob:
        values: dict[str, Any] = json.loads(text)
        values["config"] = EngineConfig(**values["config"])
        values["speculative"] = SpeculativeConfig(**values["speculative"])
        values["weights"] = LoadConfig(**values["weights"])
        return RankJob(**values)


class SpawnedPeers:
    """One child for each job."""

    def __init__(self, jobs: Sequence[RankJob]) -> None:
        self._jobs = jobs
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._said: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()

    def start(self, block_path: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        for job in self._jobs:
            rank = job.number
            ours, theirs = os.pipe()
            try:
                child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "runtime.rank", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                    pass_fds=(theirs,),
                    env={**os.environ, "PYTHONPATH": path},
                )
            finally:
                os.close(theirs)
            self._children[rank], self._said[rank] = child, b""
            self._selector.register(ours, selectors.EVENT_READ, rank)
            if child.stdin is None:
                raise RuntimeError("no pipe to the rank")
            try:
                child.stdin.write(dataclasses.replace(job, block=block_path).to_json().encode())
                child.stdin.close()
            except BrokenPipeError:
                pass  # it has ended; events says how

    def events(self) -> list[RankEvent]:
        found = []
        for key, _ in self._selector.select(POLL_S):
            rank: int = key.data
            data = os.read(key.fd, 65536)
            before = self._said[rank]
            self._said[rank] = before + data
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                found.append(RankEvent(rank, True, self._why(rank)))
            elif not before.startswith(READY) and self._said[rank].startswith(READY):
                found.append(RankEvent(rank, False))
        return found

    def kill(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()

    def _why(self, rank: int) -> str:
        code = self._children[rank].wait()
        said = self._said[rank].removeprefix(READY).decode(errors="replace").strip()
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
        return f"{how}: {said}" if said else how
