"""Messages over a socket: a JSON value and raw bytes, each with its length in front."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct("!QQ")


def pack(value: Any, data: bytes = b"") -> bytes:
    """A message. Raises TypeError for a value that is no plain JSON."""
    try:
        text = json.dumps(value).encode()  # ASCII: lone surrogates survive
    except (ValueError, RecursionError) as e:
        raise TypeError(str(e)) from e
    return b"".join((_HEADER.pack(len(text), len(data)), text, data))


def send(sock: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send what ``pack`` made. Raises TimeoutError at ``deadline`` (``time.monotonic()``), OSError where nobody
    listens."""
    sock.settimeout(_left(deadline))
    sock.sendall(message)


def receive(sock: socket.socket, deadline: float | None = None, limit: int | None = None) -> tuple[Any, bytes]:
    """The next message. Raises TimeoutError at ``deadline``, EOFError at the other's end, ValueError past ``limit``."""
    sizes = _HEADER.unpack(_read(sock, _HEADER.size, deadline))
    if limit is not None and sum(sizes) > limit:
        raise ValueError(f"a message of {sum(sizes)} bytes")
    text, data = (_read(sock, size, deadline) for size in sizes)
    return json.loads(text), data


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


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)
