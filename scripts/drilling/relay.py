"""A link between a proxy and a server that can be slowed and cut, and knows which requests went over it."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress

_NAMED = re.compile(rb"\r\nx-request-id: ([\w-]{1,64})\r\n", re.IGNORECASE)
_HEAD = 8192  # bytes in which a request names itself
PIECE, PAUSE_S = 64, 0.02  # of a slow link: about 3 kB/s


class Relay:
    """Bytes from ``port`` to ``target`` and back. ``seen``: by request when it was sent here."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._slow = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen: dict[str, float] = {}

    async def start(self, port: int = 0) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def shut(self) -> None:
        """Refuse who comes, as the port of a server that is gone does, until ``start`` at the same port."""
        self._server.close()

    async def cut(self, seconds: float) -> None:
        """Nothing goes through, and nobody is told."""
        self._open.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._open.set()

    async def slow(self, seconds: float) -> None:
        """Little goes through."""
        self._slow = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._slow = False

    async def close(self) -> None:
        self.shut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there = None
        try:
            await self._open.wait()
            from_server, there = await asyncio.open_connection("127.0.0.1", self._target)
            ways = [
                asyncio.create_task(self._pump(reader, there, named=True)),
                asyncio.create_task(self._pump(from_server, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        except (OSError, asyncio.CancelledError):
            pass  # nobody is there, or the drill is over
        finally:
            for end in (writer, there):
                if end is not None:
                    with suppress(OSError):
                        end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, named: bool = False) -> None:
        tail = b""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if named:
                    tail += data
                    for found in _NAMED.finditer(tail):
                        self.seen.setdefault(found[1].decode(), time.monotonic())
                    tail = tail[-_HEAD:] if len(tail) < 1 << 17 else b""
                while data:
                    await self._open.wait()
                    piece, data = (data[:PIECE], data[PIECE:]) if self._slow else (data, b"")
                    writer.write(piece)
                    await writer.drain()
                    if self._slow:
                        await asyncio.sleep(PAUSE_S)
