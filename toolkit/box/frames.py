"""Messages over a socket: a JSON value and raw bytes, each with its length in front."""

from __future__ import annotations

import json
import mmap
import socket
import struct
import time
from typing import Any, TypeAlias

_HEADER = struct.Struct("!QQ")


Buffer: TypeAlias = bytes | bytearray | memoryview
Data: TypeAlias = Buffer | list[Buffer]  # pieces of a list are let go of as they are sent
LARGE = 1 << 20  # bytes from which on a mapping of their own holds them, which goes back to the system as a whole


def pack(value: Any, data: Data = b"") -> list[Buffer]:
    """A message. Raises TypeError for a value that is no plain JSON."""
    try:
        text = json.dumps(value).encode()  # ASCII: lone surrogates survive
    except (ValueError, RecursionError) as e:
        raise TypeError(str(e)) from e
    # an empty piece would be sent to who may have answered, and left, already
    pieces = [piece for piece in (data if isinstance(data, list) else [data]) if memoryview(piece).nbytes]
    return [_HEADER.pack(len(text), sum(memoryview(piece).nbytes for piece in pieces)) + text, *pieces]


def send(sock: socket.socket, message: list[Buffer], deadline: float | None = None) -> None:
    """Send what ``pack`` made, which is empty then. Raises TimeoutError at ``deadline`` (``time.monotonic()``), OSError
    where nobody listens."""
    message.reverse()
    while message:
        sock.settimeout(_left(deadline))
        sock.sendall(message.pop())


def receive(
    sock: socket.socket, deadline: float | None = None, limit: int | None = None, mapped: bool = False
) -> tuple[Any, Any]:
    """The next message, its data as bytes; ``mapped``: large ones as a mapping of memory that may be written to. Raises
    TimeoutError at ``deadline``, EOFError at the other's end, ValueError past ``limit``."""
    sizes = _HEADER.unpack(_read(sock, _HEADER.size, deadline))
    if limit is not None and sum(sizes) > limit:
        raise ValueError(f"a message of {sum(sizes)} bytes")
    text = _read(sock, sizes[0], deadline)
    read = _mapped if mapped and sizes[1] > LARGE else _read
    return json.loads(text), read(sock, sizes[1], deadline)


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    parts, missing = [], size
    while missing:
        sock.settimeout(_left(deadline))
        part = sock.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _mapped(sock: socket.socket, size: int, deadline: float | None) -> mmap.mmap:
    """Pages come to it as they are written: there is one copy of what arrives."""
    found, at = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
    with memoryview(found) as view:
        while at < size:
            sock.settimeout(_left(deadline))
            if not (read := sock.recv_into(view[at : at + LARGE])):
                raise EOFError
            at += read
    return found


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)
