"""What runs beside this process: that it starts, what becomes of it, and its end.

One thread starts, watches and ends it all, for a process of PR_SET_PDEATHSIG dies with the thread that started it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

STOP_S = 5.0  # that peers have to end when told to


class RankFailed(RuntimeError):
    """A rank ended, failed or fell silent; the group is of no use any more."""


class RankEvent(NamedTuple):
    """What became of a peer: it is ready (its model is loaded), or it has ended, and why."""

    rank: int
    ended: bool
    why: str = ""


class Peers(Protocol):
    """Ranks beside this one, or other stages, wherever they run. All calls come from one thread, which lives as long as they do."""

    def start(self, block_path: str) -> None:
        """Starts all of them. block_path: of the memory that ranks of a host share; "" between stages."""

    def events(self) -> Sequence[RankEvent]:
        """What has happened since the last call; returns within about 0.2 s."""

    def kill(self) -> None:
        """Ends those that still run, at once."""


class Lives:
    """The lives of some peers, each by its number. Holds nothing of the executor, so that one forgotten takes its peers along.

    `story` says what went wrong first; from then on the group is of no use. What a subclass does about that is in its hooks.
    """

    def __init__(self, peers: Peers, numbers: Iterable[int], what: str, block_path: str = "") -> None:
        self.lock = threading.Lock()  # around a plan
        self.story: str | None = None
        self._peers, self._what, self._block_path = peers, what, block_path
        self._changed = threading.Condition()  # guards the four fields below
        self._loading = set(numbers)
        self._running = set(self._loading)
        self._killing = self._stopping = False
        self._thread = threading.Thread(target=self._live, name=f"{what}s", daemon=True)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether the peers have been told to end."""
        return self._stopping

    def say_stop(self) -> None:
        """Tells the peers to end; called between two plans."""

    def tell_lost(self, number: int) -> None:
        """Makes whoever waits for peers give up; `number` is gone, or this process's own if nobody else is."""

    def release(self) -> None:
        """Lets go of what the peers needed; they have ended."""

    def wait_ready(self) -> None:
        """Returns once all have loaded. Raises RankFailed if one can not."""
        with self._changed:
            self._changed.wait_for(lambda: self.story is not None or not self._loading)
        self.check()

    def check(self) -> None:
        """Raises RankFailed if something went wrong."""
        if self.story is not None:
            raise RankFailed(self.story)

    def settle(self, within_s: float) -> None:
        """Waits that long for a story, for who sees a peer's connection end before its end is known."""
        with self._changed:
            self._changed.wait_for(lambda: self.story is not None, within_s)

    def fail(self, story: str | None = None) -> None:
        """Ends all peers at once; the first story stays."""
        with self._changed:
            self.story = self.story or story or f"the {self._what}s were ended by force"
            self._killing = True
        self.tell_lost(0)
        self._thread.join(STOP_S)

    def end(self) -> None:
        """Stops the peers, by force where they do not listen."""
        if self.story is None and self.lock.acquire(timeout=1.0):
            try:
                with self._changed:
                    self._stopping = True
                self.say_stop()
            finally:
                self.lock.release()
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            self.fail()
        self.story = self.story or f"the {self._what}s were stopped"

    def _live(self) -> None:
        try:
            self._peers.start(self._block_path)
            while self._running:
                for event in self._peers.events():
                    self._note(event)
                if self._killing:
                    self._peers.kill()
        except BaseException as error:
            with self._changed:
                self.story = self.story or f"the {self._what}s could not be started or watched: {type(error).__name__}: {error}"
                self._changed.notify_all()
            self.tell_lost(0)
            with contextlib.suppress(Exception):
                self._peers.kill()
        finally:
            self.release()

    def _note(self, event: RankEvent) -> None:
        with self._changed:
            self._loading.discard(event.rank)
            if event.ended:
                self._running.discard(event.rank)
                if not self._stopping:
                    self.story = self.story or f"{self._what} {event.rank} {event.why}"
            self._changed.notify_all()
        if event.ended and not self._stopping:
            self.tell_lost(event.rank)
