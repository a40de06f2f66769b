"""A link to a device whose memory is the host's, and the triples of a random checkpoint: for tests of residency."""

from __future__ import annotations

import ctypes
import threading

import numpy as np


class HostLink:
    """`runtime.kernels_cu.link.Link` for several threads. Copies are done at once, unless `late`: then at `wait` or `end`, so that
    reuse too early shows."""

    stream = 0

    def __init__(self, late: bool = False) -> None:
        self.late, self.queue, self.closed, self.most = late, [], False, 0
        self.marks: dict[int, int] = {}
        self.done = self.sent = 0
        self.lock = threading.RLock()  # a reader waits while another sends
        self.users = {threading.get_ident()}

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xEE, np.uint8)

    def use(self) -> None:
        self.users.add(threading.get_ident())

    def send(self, host: np.ndarray, to: int) -> None:
        assert threading.get_ident() in self.users
        with self.lock:
            self.sent += 1
            self.queue.append((host, to))
            if not self.late:
                self._run(self.sent)

    def mark(self, slot: int) -> None:
        self.marks[slot] = self.sent

    def wait(self, slot: int) -> None:
        self._run(self.marks.get(slot, 0))

    def begin(self) -> None:
        pass

    def end(self) -> None:
        self._run(self.sent)

    def close(self) -> None:
        self._run(self.sent)
        self.closed = True

    def _run(self, upto: int) -> None:
        with self.lock:
            self.most = max(self.most, len(self.queue))
            while self.done < upto:
                host, to = self.queue.pop(0)
                ctypes.memmove(to, host.ctypes.data, host.nbytes)
                self.done += 1
