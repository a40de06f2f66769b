"""One TCP connection between two stages of a model: records of bytes, each with its length and its number. No pickles.

    record    magic u32 | kind u32 | sequence u64 | bytes u64, then so many bytes

Both ends count records from 1 in each direction, so one that is lost, doubled or cut is an error and never a wrong token. Who is
at the other end was made sure when the connection was opened (`runtime.stage_hello`); from then on it is plain TCP, for networks
that are trusted as NCCL's is.

A host that vanishes is noticed by TCP within 6 s, also while nobody waits; a process that ends, at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.shared import PeerLost
from runtime.types import Array

MAGIC = 0x53544745  # "STGE"
_HEAD = struct.Struct("<IIQQ")
FAILED = 0xFFFF  # the kind of a record that says why the other end can not go on, in UTF-8
MAX_TEXT = 4000  # bytes of it
VANISHED_S = 5  # after which TCP gives up on a host that answers nothing, or that leaves full buffers unread for so long
POLL_S = 0.2


class StageLost(PeerLost):
    """The other end has gone, failed, or does not answer."""


class Link:
    """This process's end of a connection. name: whom it leads to, for errors. deadline_s: that the other end may take.

    One thread sends and receives; `lost` and `close` may be called by any.
    """

    def __init__(self, sock: socket.socket, name: str, deadline_s: float) -> None:
        self.name, self.deadline_s = name, deadline_s
        self._socket, self._sent, self._received, self._left = sock, 0, 0, 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, VANISHED_S)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_S * 1000)
        sock.settimeout(deadline_s)
        self._peek = sock.dup()  # never waits, also where another thread takes what it has seen
        self._peek.settimeout(0.0)

    def set_deadline(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._socket.settimeout(deadline_s)

    def send(self, kind: int, *parts: Array | bytes) -> None:
        """One record of these bytes, one after the other; arrays must be contiguous."""
        views: list[Any] = [memoryview(part) if isinstance(part, bytes) else _bytes_of(part) for part in parts]
        self._sent += 1
        views = [_HEAD.pack(MAGIC, kind, self._sent, sum(len(view) for view in views)), *(view for view in views if len(view))]
        try:
            while views:
                done = self._socket.sendmsg(views[:64])
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if done:
                    views[0] = memoryview(views[0])[done:]
        except OSError as error:
            raise self._gone(error, "has taken nothing") from None

    def receive(self, check: Callable[[], None] | None = None) -> tuple[int, int]:
        """(kind, bytes) of the next record, whose bytes `read` brings. Waits deadline_s; with `check`, which may raise and is called
        five times a second, as long as it takes. Raises StageLost, also with what a FAILED record says."""
        while check is not None and not _readable(self._socket, POLL_S):
            check()
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        magic, kind, sequence, nbytes = _HEAD.unpack(head)
        self._received += 1
        if (magic, sequence) != (MAGIC, self._received):
            raise StageLost(f"{self.name} sent record {sequence} with magic {magic:#x}, where {self._received} with {MAGIC:#x} was due")
        self._left = nbytes
        if kind == FAILED:
            raise StageLost(f"{self.name} failed: {self.text()}")
        return kind, nbytes

    def read(self, into: Array) -> None:
        """The next bytes of the record that `receive` has announced. Raises StageLost if it holds fewer."""
        view = _bytes_of(into)
        if len(view) > self._left:
            raise StageLost(f"{self.name} sent a record with {self._left} bytes left, where {len(view)} were due")
        self._left -= len(view)
        self._fill(view)

    def read_bytes(self, most: int = MAX_TEXT) -> bytes:
        """The rest of the record, of `most` bytes at most."""
        if self._left > most:
            raise StageLost(f"{self.name} sent a record with {self._left} bytes left, where at most {most} were due")
        rest = bytearray(self._left)
        self._left = 0
        self._fill(memoryview(rest))
        return bytes(rest)

    def text(self) -> str:
        return self.read_bytes().decode(errors="replace")

    def expect(self, kind: int, check: Callable[[], None] | None = None) -> int:
        """Bytes of the next record, which must be of that kind."""
        came, nbytes = self.receive(check)
        if came != kind:
            raise StageLost(f"{self.name} sent a record of kind {came}, where {kind} was due")
        return nbytes

    def ready(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        try:
            return _readable(self._socket, 0.0)
        except ValueError:  # closed here
            return True

    def lost(self) -> str | None:
        """Why nothing more will come, None while the connection stands; does not wait and reads nothing that is due."""
        try:
            came = self._peek.recv(_HEAD.size + MAX_TEXT, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError as error:
            return str(self._gone(error))
        if not came:
            return str(self._gone(None))
        if len(came) >= _HEAD.size and _HEAD.unpack(came[: _HEAD.size])[:2] == (MAGIC, FAILED):
            return f"{self.name} failed: {came[_HEAD.size :].decode(errors='replace')}"
        return None

    def fail(self, why: str) -> None:
        """Tells the other end why this one can not go on, if it still listens."""
        with contextlib.suppress(StageLost):
            self.send(FAILED, why.encode()[:MAX_TEXT])

    def close(self) -> None:
        """Ends the connection; who waits at either end gets StageLost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._peek.close()

    def _fill(self, view: memoryview) -> None:
        try:
            while view:
                got = self._socket.recv_into(view)
                if not got:
                    raise self._gone(None)
                view = view[got:]
        except OSError as error:
            raise self._gone(error, "has not answered") from None

    def _gone(self, error: OSError | None, silent: str = "") -> StageLost:
        """What an error means. A wait that was too long has no number; TCP's own, for a host that answers nothing, has one."""
        if isinstance(error, TimeoutError) and error.errno is None:
            return StageLost(f"{self.name} {silent} for {self.deadline_s:g} s")
        return StageLost(f"{self.name} has gone" + (f" ({error})" if error else ""))


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that takes connections to an address of this host, at any free port unless told."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=64)
    sock.settimeout(POLL_S)
    return sock


def accept(listener: socket.socket, check: Callable[[], None]) -> tuple[socket.socket, str]:
    """The next connection and the address it comes from; calls `check`, which may raise, five times a second."""
    while True:
        try:
            sock, address = listener.accept()
        except TimeoutError:
            check()
            continue
        return sock, str(address[0])


def connect(host: str, port: int, within_s: float) -> socket.socket:
    """Raises StageLost if nobody takes the connection for that long."""
    end = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.1, min(5.0, end - time.monotonic())))
        except OSError as error:
            if time.monotonic() > end:
                raise StageLost(f"{host} port {port} takes no connection for {within_s:g} s: {error}") from None
            time.sleep(POLL_S)


def _bytes_of(array: Array) -> memoryview:
    flat: memoryview = array.reshape(-1).view(np.uint8).data
    return flat


def _readable(sock: socket.socket, within_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
