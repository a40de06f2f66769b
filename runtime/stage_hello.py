"""The first words on a connection between stages: both know the launch's secret, speak one version, and were told the same things.

both         magic | protocol | nonce                   a fixed 40 bytes, whatever the version
who called   HMAC-SHA256(token, "call" both nonces)
who answers  HMAC-SHA256(token, "answer" both nonces)   only to who has shown that it knows the token
who called   HELLO: JSON of its stage, its port and what it was told
who answers  WELCOME, or FAILED with each key that differs and both values
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runtime.stage_link import Link, StageLost

PROTOCOL = 1
HELLO, WELCOME = 1, 2
HELLO_S = 20.0  # that the other end may take for its words
MAX_HELLO = 1 << 16
_GREETING = struct.Struct("<4sI32s")
_MAGIC = b"STGE"


class StageRefused(ValueError):
    """The other end is not what was expected there; the text says in what, with both values."""


class StageDiffers(StageRefused):
    """It knows the token and was told other things."""


def call(sock: socket.socket, name: str, token: str, hello: Mapping[str, Any], deadline_s: float) -> Link:
    """A link over a connection that this end has opened. Raises StageRefused with the other's reasons, StageLost; then it is closed."""
    with _or_closed(Link(sock, name, HELLO_S)) as link:
        own, theirs = _greet(sock, name)
        sock.sendall(_proof(token, b"call", own, theirs))
        proof = _exactly(sock, 32, f"{name} does not know this launch's token, or this end does not")
        if not hmac.compare_digest(proof, _proof(token, b"answer", theirs, own)):
            raise StageRefused(f"{name} does not know this launch's token")
        link.send(HELLO, json.dumps(dict(hello)).encode())
        try:
            link.expect(WELCOME)
        except StageLost as lost:
            raise StageRefused(str(lost)) from None
    link.set_deadline(deadline_s)
    return link


def answer(
    sock: socket.socket, name: str, token: str, judge: Callable[[Mapping[str, Any]], str | None], deadline_s: float
) -> tuple[Link, Mapping[str, Any]]:
    """A link over a connection that the other end has opened, and its hello. judge says why it is refused, None if it is not.

    Raises StageRefused, StageLost; then it is closed.
    """
    with _or_closed(Link(sock, name, HELLO_S)) as link:
        own, theirs = _greet(sock, name)
        if not hmac.compare_digest(_exactly(sock, 32, f"{name} has gone"), _proof(token, b"call", theirs, own)):
            raise StageRefused(f"{name} does not know this launch's token")
        sock.sendall(_proof(token, b"answer", own, theirs))
        link.expect(HELLO)
        hello = json.loads(link.read_bytes(MAX_HELLO))
        why = judge(hello) if isinstance(hello, dict) else "its hello is no object"
        if why is not None:
            link.fail(f"refused: {why}")
            raise StageDiffers(why)
        link.send(WELCOME)
    link.set_deadline(deadline_s)
    return link, hello


@contextlib.contextmanager
def _or_closed(link: Link) -> Iterator[Link]:
    """A link that is closed if what follows fails; an error of the connection is StageLost."""
    try:
        yield link
    except BaseException as error:
        link.close()
        if isinstance(error, OSError):
            raise StageLost(f"{link.name} has gone ({error})") from None
        raise


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> str | None:
    """Each key with both values where they differ; None if all are equal. Values are those of JSON."""
    found = [
        f"{key} is {mine.get(key)!r} here and {theirs.get(key)!r} at {where}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]
    return "; ".join(found) or None


def _greet(sock: socket.socket, name: str) -> tuple[bytes, bytes]:
    """Both nonces, this end's first."""
    own = os.urandom(32)
    sock.sendall(_GREETING.pack(_MAGIC, PROTOCOL, own))
    magic, protocol, theirs = _GREETING.unpack(_exactly(sock, _GREETING.size, f"{name} has gone"))
    if magic != _MAGIC:
        raise StageRefused(f"{name} is no stage of this runtime: it begins with {magic!r}")
    if protocol != PROTOCOL:
        raise StageRefused(f"protocol is {PROTOCOL} here and {protocol} at {name}; run one version of the package everywhere")
    return own, theirs


def _proof(token: str, role: bytes, own: bytes, theirs: bytes) -> bytes:
    return hmac.new(token.encode(), role + own + theirs, hashlib.sha256).digest()


def _exactly(sock: socket.socket, count: int, otherwise: str) -> bytes:
    found = b""
    try:
        while len(found) < count:
            part = sock.recv(count - len(found))
            if not part:
                raise StageRefused(otherwise)
            found += part
    except OSError as error:
        raise StageLost(f"{otherwise} ({error})") from None
    return found
