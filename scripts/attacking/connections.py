"""Connections that are no requests, half a request, or two in one."""

from __future__ import annotations

import contextlib
import random
import resource
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from attacking import smuggled
from attacking.target import HEAD, Target


def half_requests(target: Target) -> Iterator[str]:
    held = [target.connect() for _ in range(200)]
    for i, connection in enumerate(held):
        connection.sendall(
            (b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n")[i % 4]
        )
    time.sleep(2)
    for connection in held:
        with contextlib.suppress(OSError):
            connection.sendall(b"X")
    ended = 0
    for connection in held:
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                pass
            ended += 1
        connection.close()
    yield f"{ended} of {len(held)} ended by the server"


def half_heads(target: Target) -> Iterator[str]:
    """More than the server has connections for, without a key; whoever asks properly is answered meanwhile."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as held:
        for i in range(3_000):
            with contextlib.suppress(OSError):
                held.enter_context(target.connect()).sendall((b"", HEAD)[i % 2])
            if i % 500 == 499:
                yield f"/health {target.health()[0]} beside {i + 1:,} half heads"
                yield target.post({"prompt": "x"})


def smuggling(target: Target) -> Iterator[str]:
    parts = urlsplit(target.url)
    wrong = smuggled.wrong(parts.hostname or "", parts.port or 80)
    yield f"{len(smuggled.REFUSED) + len(smuggled.ONE)} requests, {len(wrong)} read wrongly"
    yield from (f"no answer as expected: {line}" for line in wrong)


def no_http(target: Target) -> Iterator[str]:
    draw = random.Random(3)
    junk = [b"\x16\x03\x01", b"GET\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n", HEAD + b"A" * 100_000]
    for i in range(200):
        time.sleep(0.005)  # it is the junk that is tried, not how many connections a second there can be
        with contextlib.suppress(OSError), target.connect() as connection:
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" if i % 2 else b""
            )
            connection.sendall(junk[i % len(junk)] + draw.randbytes(40))
    yield "sent"
