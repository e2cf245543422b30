"""One request over HTTP/1.1 on a connection of its own. While it runs it is only written down when which bytes came:
a client that read them at once would take the time of the server that it measures. ``h11`` reads them afterwards."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import field
from urllib.parse import urlsplit

import h11

from toolkit.base.lazy_dataclass import dataclass

LAST_CHUNK = b"0\r\n\r\n"
HEAD_BYTES = 1 << 20


@dataclass
class Exchange:
    """``start``: when it began, ``time.perf_counter()``; ``parts``: what came, and when; ``error``: why no more did."""

    start: float = field(default_factory=time.perf_counter)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    def read(self) -> Iterator[tuple[float, h11.Event]]:
        """The answer's head, its data and its end, with the times. Raises h11.RemoteProtocolError where it is none."""
        reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        reader.send(h11.Request(method="POST", target="/", headers=[("Host", "-")]))
        reader.send(h11.EndOfMessage())
        for when, data in [*self.parts, (time.perf_counter(), b"")]:
            reader.receive_data(data)
            while (event := reader.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                assert isinstance(event, h11.Event)
                yield when, event
                if isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return


class _Listener(asyncio.Protocol):
    def __init__(self, parts: list[tuple[float, bytes]]) -> None:
        self._parts = parts
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._parts.append((time.perf_counter(), data))
        if data.endswith(LAST_CHUNK):
            self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def post(
    url: str,
    body: bytes,
    headers: dict[str, str],
    timeout: float,
    connect_timeout: float,
    tls: ssl.SSLContext | None = None,
) -> Exchange:
    """Send ``body`` to ``url`` and wait for the end of the answer, or of the connection. ``timeout``: seconds of
    silence after which it has failed. ``tls``: for https."""
    to = urlsplit(url)
    port = to.port or (443 if tls else 80)
    writer = h11.Connection(h11.CLIENT)
    told = {"Host": to.netloc, "Connection": "close", "Content-Length": str(len(body)), **headers}
    request = h11.Request(method="POST", target=to.path + (f"?{to.query}" if to.query else ""), headers=[*told.items()])
    found = Exchange()
    listener = _Listener(found.parts)
    try:
        async with asyncio.timeout(connect_timeout):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: listener, to.hostname or "", port, ssl=tls
            )
    except (OSError, TimeoutError) as error:
        found.error = f"cannot be reached ({error or type(error).__name__})"
        return found
    try:
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            transport.write(writer.send(event) or b"")
        while not listener.ended.is_set():
            last = found.parts[-1][0] if found.parts else found.start
            left = last + timeout - time.perf_counter()
            if left <= 0:
                found.error = f"nothing came for {timeout:g} s"
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await listener.ended.wait()
    finally:
        transport.abort()
    return found
