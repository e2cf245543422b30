"""How two engines speak that hand blocks over: over TCP, with a secret that both have, and TLS where one is told to.

The one that connects sends ``MAGIC`` and a nonce; the other one a nonce, and a MAC of both nonces; the first a MAC of
its own, and the digest of its model. Neither MAC can be made without the secret, or used again. Then it asks: ``WHICH``
of some names are there, or to ``READ`` one. Blocks stay sealed on their way, so that whoever sits on the line can
neither read nor change one. Every read and write has a deadline, and nothing is allocated by a number that the other
end sends but within what is expected."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import numpy as np

from toolkit.engine.cache.kept.block import Buffer

MAGIC = b"TKMV\r\n\x1a\x01"
NONCE = 32
MAC = 32
MODEL = 32  # bytes of a model's digest
WHICH, READ = b"W", b"R"
NAME = struct.Struct("<32sH")  # of a block, and its group
COUNT = struct.Struct("<I")
SIZE = struct.Struct("<Q")  # of a sealed block; 0 = it is not there
MOST_NAMES = 1 << 16  # in one question
HELLO_SECONDS = 5.0  # that the whole greeting may take
WELCOME, OTHER_MODEL = b"\x01", b"\x02"


class WireError(OSError):
    """The other end is not one to speak with, or not one that keeps to what is said above."""


class Line:
    """A connection on which everything has a deadline, however slowly the other end drips. Raises OSError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: Sequence[Buffer], seconds: float) -> None:
        until = time.monotonic() + seconds
        for part in data:
            self._sock.settimeout(_left(until))
            self._sock.sendall(part)  # whose timeout is of the whole

    def receive(self, count: int, seconds: float) -> memoryview:
        found, at, until = np.empty(count, np.uint8).data, 0, time.monotonic() + seconds
        while at < count:
            self._sock.settimeout(_left(until))
            got = self._sock.recv_into(found[at:])
            if not got:
                raise WireError("the other end has closed the connection" if at else "the connection is closed")
            at += got
        return found

    def close(self) -> None:
        self._sock.close()


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def greet(line: Line, secret: bytes, model: bytes) -> None:
    """The part of the one that connects. Raises OSError, WireError that says why."""
    mine = secrets.token_bytes(NONCE)
    line.send([MAGIC + mine], HELLO_SECONDS)
    answer = line.receive(NONCE + MAC, HELLO_SECONDS)
    theirs = bytes(answer[:NONCE])
    if not hmac.compare_digest(answer[NONCE:], _mac(secret, b"lends", mine, theirs)):
        raise WireError("it has another kv_transfer_key")
    line.send([_mac(secret, b"takes", mine, theirs, model), model], HELLO_SECONDS)
    if (said := bytes(line.receive(1, HELLO_SECONDS))) != WELCOME:
        raise WireError("it runs another model" if said == OTHER_MODEL else "it does not speak as this version does")


def admit(line: Line, secret: bytes, model: bytes) -> None:
    """The part of the other one. Raises OSError, WireError."""
    until = time.monotonic() + HELLO_SECONDS
    hello = line.receive(len(MAGIC) + NONCE, HELLO_SECONDS)
    if hello[: len(MAGIC)] != MAGIC:
        raise WireError("no engine of this version")
    theirs, mine = bytes(hello[len(MAGIC) :]), secrets.token_bytes(NONCE)
    line.send([mine + _mac(secret, b"lends", theirs, mine)], _left(until))
    answer = line.receive(MAC + MODEL, _left(until))
    told = bytes(answer[MAC:])
    if not hmac.compare_digest(answer[:MAC], _mac(secret, b"takes", theirs, mine, told)):
        raise WireError("another kv_transfer_key")
    same = told == model
    line.send([WELCOME if same else OTHER_MODEL], _left(until))
    if not same:
        raise WireError("another model")


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")
