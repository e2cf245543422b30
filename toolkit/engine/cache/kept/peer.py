"""An engine at the other end of a connection, as a place that blocks are read from. ``port.py`` is that other end."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from toolkit.base import tls
from toolkit.engine.cache.kept import wire
from toolkit.engine.cache.kept.block import Block, Seal
from toolkit.engine.cache.kept.port import split
from toolkit.engine.cache.kept.shelf import Counts

log = logging.getLogger(__name__)
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 3.0  # that an answer may take, and so much more for each
PER_BYTE = 1 / (4 << 20)  # of it: 4 MiB/s at least
PAUSE_SECONDS = 10.0  # after a failure, in which it is not asked
T = TypeVar("T")


class Peer:
    """``seal``, ``model``, ``sizes``: as of ``shelf.Files``; both ends have the same. ``counts``: to count in.
    ``secure``: it speaks TLS."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        model: bytes,
        seal: Seal,
        sizes: Sequence[int],
        counts: Counts,
        secure: bool = False,
    ) -> None:
        """Connects to nobody yet. Raises UsageError for an address that is none."""
        self.counts = counts
        self._where = split("address", address)
        self._address, self._secret, self._model = address, secret, model
        self._seal, self._sizes, self._secure = seal, sizes, secure
        self._lock = threading.Lock()  # around counts and those below
        self._idle: list[wire.Line] = []
        self._paused = float("-inf")

    def check(self) -> None:
        """Raise OSError that says why it cannot be spoken with."""
        self._give_back(self._connect())

    def which(self, blocks: Sequence[Block]) -> frozenset[Block]:
        def ask(line: wire.Line) -> frozenset[Block]:
            found: list[Block] = []
            for start in range(0, len(blocks), wire.MOST_NAMES):
                part = blocks[start : start + wire.MOST_NAMES]
                names = b"".join(wire.NAME.pack(*self._name(block)) for block in part)
                line.send([wire.WHICH + wire.COUNT.pack(len(part)), names], ANSWER_SECONDS)
                there = line.receive(len(part), ANSWER_SECONDS)
                found += [block for block, has in zip(part, there, strict=True) if has]
            return frozenset(found)

        return (self._exchange(ask) if blocks else None) or frozenset()

    def read(self, block: Block) -> memoryview | None:
        head = block.head(self._model, self._sizes[block.group])
        expected = self._seal.extra + len(head) + self._sizes[block.group]
        seconds = ANSWER_SECONDS + expected * PER_BYTE

        def ask(line: wire.Line) -> memoryview:
            line.send([wire.READ + wire.NAME.pack(*self._name(block))], ANSWER_SECONDS)
            (size,) = wire.SIZE.unpack(line.receive(wire.SIZE.size, ANSWER_SECONDS))
            if size not in (0, expected):
                raise wire.WireError(f"a block of {size:,} bytes, expected {expected:,}")
            return line.receive(size, seconds)

        found = self._exchange(ask)
        if not found:
            return None
        numbers = self._seal.open(found, head)
        with self._lock:
            if numbers is None:
                self.counts.refused += 1
            else:
                self.counts.read_bytes += len(found)
        if numbers is None:
            self._failed(wire.WireError("a block is not as it was sealed"))
        return numbers

    def close(self) -> None:
        with self._lock:
            lines, self._idle = self._idle, []
        for line in lines:
            line.close()

    def _name(self, block: Block) -> tuple[bytes, int]:
        return bytes.fromhex(self._seal.called(block.key)), block.group

    def _exchange(self, ask: Callable[[wire.Line], T]) -> T | None:
        """What the other end answers; None where it does not: then nobody asks it for a while."""
        if time.monotonic() < self._paused:
            return None
        with self._lock:
            line = self._idle.pop() if self._idle else None
        if line is not None:  # it may have been closed meanwhile
            try:
                return self._asked(line, ask)
            except TimeoutError as error:
                self._failed(error)
                return None
            except OSError:
                pass
        try:
            return self._asked(self._connect(), ask)
        except (OSError, ValueError) as error:  # ValueError: of a name that is none of a host
            self._failed(error)
            return None

    def _asked(self, line: wire.Line, ask: Callable[[wire.Line], T]) -> T:
        try:
            found = ask(line)
        except BaseException:
            line.close()
            raise
        self._give_back(line)
        return found

    def _give_back(self, line: wire.Line) -> None:
        with self._lock:
            self._idle.append(line)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            told = time.monotonic() < self._paused  # by another block that was on its way too
            self.counts.failures += 1
            self._paused = time.monotonic() + PAUSE_SECONDS
        if not told:
            log.warning("the engine at %s lends nothing now: %s", self._address, tls.why(error))

    def _connect(self) -> wire.Line:
        sock = socket.create_connection(self._where, CONNECT_SECONDS)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(wire.HELLO_SECONDS)
            if self._secure:
                try:
                    sock = tls.checking().wrap_socket(sock, server_hostname=self._where[0])
                except ssl.SSLError as error:
                    raise wire.WireError(f"TLS: {error}") from error
            line = wire.Line(sock)
            wire.greet(line, self._secret, self._model)
        except BaseException:
            sock.close()
            raise
        return line
