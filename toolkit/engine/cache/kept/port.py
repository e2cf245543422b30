"""The port at which other engines get the blocks that this one lends. ``wire.py`` says how they speak."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from contextlib import suppress

from toolkit.engine.cache.kept import wire
from toolkit.engine.cache.kept.folder import Folder, RefusedError, file_name
from toolkit.errors import ToolkitError, UsageError

log = logging.getLogger(__name__)
MOST = 64  # connections
STRANGERS = 32  # of them that have not shown the secret yet
IDLE_SECONDS = 120.0  # after which one that asks nothing is closed
ANSWER_SECONDS = 30.0  # that the other end may take to read an answer
REST_SECONDS = 0.2  # where the system has no connection to give


class Port:
    """Answers in threads of its own until it is closed. It interprets no block: it sends files of ``folder``, which are
    sealed. ``address``: where it listens, HOST:PORT."""

    def __init__(
        self, flag: str, address: str, secret: bytes, model: bytes, folder: Folder, tls: ssl.SSLContext | None
    ) -> None:
        """Raises UsageError for an address that is none, ToolkitError for one that cannot be listened at."""
        self._secret, self._model, self._folder, self._tls = secret, model, folder, tls
        host, port = split(flag, address)
        try:
            family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._sock = socket.socket(family, kind, proto)
        except (OSError, UnicodeError) as error:  # the latter of a name with two dots in a row
            told = getattr(error, "strerror", None) or error
            raise ToolkitError(f"{flag}: expected an address of this machine, found {address} ({told})") from error
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(where)
            self._sock.listen(MOST)
        except OSError as error:
            self._sock.close()
            if error.errno == errno.EADDRNOTAVAIL:
                what = f"expected an address of this machine, found {address}"
            else:
                what = f"cannot listen at {address}: {error.strerror}; choose another port, 0 is any free one"
            raise ToolkitError(f"{flag}: {what}") from error
        self.address = f"{host}:{self._sock.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._strangers = 0
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="toolkit-kv-port", daemon=True).start()

    def close(self) -> None:
        """No connection is left afterwards."""
        self._closed.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # which wakes the thread that waits for one
        self._sock.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, where = self._sock.accept()
            except OSError:
                self._closed.wait(REST_SECONDS)
                continue
            with self._lock:
                welcome = len(self._open) < MOST and self._strangers < STRANGERS and not self._closed.is_set()
                if welcome:
                    self._open.add(sock)
                    self._strangers += 1
            if not welcome:
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock, where[0]), name="toolkit-kv-peer", daemon=True).start()
            except RuntimeError:  # no thread to be had
                self._forget(sock, stranger=True)

    def _forget(self, sock: socket.socket, *, stranger: bool) -> None:
        with self._lock:
            self._open.discard(sock)
            self._strangers -= stranger
        sock.close()

    def _serve(self, sock: socket.socket, host: str) -> None:
        stranger, plain = True, sock
        try:
            sock.settimeout(wire.HELLO_SECONDS)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open.discard(plain)
                    self._open.add(sock)
            line = wire.Line(sock)
            wire.admit(line, self._secret, self._model)
            with self._lock:
                self._strangers -= 1
            stranger = False
            while True:
                self._answer(line)
        except (OSError, ValueError) as error:
            if stranger and not self._closed.is_set():
                log.warning("kv_transfer_address: %s is refused: %s", host, error)
            else:
                log.info("kv_transfer_address: %s is gone: %s", host, error)
        finally:
            self._forget(sock, stranger=stranger)

    def _answer(self, line: wire.Line) -> None:
        asked = bytes(line.receive(1, IDLE_SECONDS))
        if asked == wire.WHICH:
            (count,) = wire.COUNT.unpack(line.receive(wire.COUNT.size, ANSWER_SECONDS))
            if count > wire.MOST_NAMES:
                raise wire.WireError(f"it asks for {count:,} blocks at once")
            names = line.receive(count * wire.NAME.size, ANSWER_SECONDS)
            there = bytes((self._folder.size(_file(*name)) or 0) > 0 for name in wire.NAME.iter_unpack(names))
            line.send([there], ANSWER_SECONDS)
        elif asked == wire.READ:
            name = _file(*wire.NAME.unpack(line.receive(wire.NAME.size, ANSWER_SECONDS)))
            found = self._read(name)
            line.send([wire.SIZE.pack(len(found)), found], ANSWER_SECONDS)
        else:
            raise wire.WireError("it asks for what is not known")

    def _read(self, name: str) -> memoryview:
        """A whole file, empty where it is not to be had."""
        try:
            size = self._folder.size(name)
            return self._folder.read(name, size) if size and size > 0 else memoryview(b"")
        except (OSError, RefusedError):
            return memoryview(b"")


def _file(name: bytes, group: int) -> str:
    return file_name(name.hex(), group)


def split(flag: str, address: str) -> tuple[str, int]:
    """HOST:PORT apart. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or "[" in host or not (port.isascii() and port.isdecimal() and int(port[:6]) < 1 << 16):
        raise UsageError(f"{flag}: expected HOST:PORT, such as 10.0.0.4:23400, found {address!r:.80}")
    return host, int(port)
