"""Messages on their way into a pipe: whoever sends one never waits for the reader, nor behind another's many."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

MAX_UNSENT = 256 << 20  # bytes that wait, from which on it is full
Lanes = dict[str | None, deque[bytes]]  # whose turn is next stands first


class Outbox:
    """Writes what ``put`` takes in a thread of its own: lanes take turns, and within a lane it keeps order. A pipe that
    broke swallows the rest in silence: who reads from the other end notices first."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._parts: deque[Lanes] = deque()  # all of the first goes before anything of the next
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="toolkit-engine-outbox", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether so much waits that no more requests should be sent."""
        return self._bytes > MAX_UNSENT

    def put(self, data: bytes, lane: str | None = None) -> None:
        """Take a message of ``lane``; without one it goes behind all that came before and before all that come."""
        with self._changed:
            if not self._closed:
                if not self._parts or (lane is None) != (None in self._parts[-1]):
                    self._parts.append({})
                self._parts[-1].setdefault(lane, deque()).append(data)
                self._bytes += len(data)
                self._changed.notify()

    def close(self) -> None:
        """Drop what waits and end the thread; one that is writing ends when the pipe breaks."""
        with self._changed:
            self._closed = True
            self._parts.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._parts and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                data = self._next()
            with suppress(OSError, ValueError):
                self._pipe.send_bytes(data)
            with self._changed:
                self._bytes -= len(data)

    def _next(self) -> bytes:
        lanes = self._parts[0]
        lane = next(iter(lanes))
        waiting = lanes.pop(lane)
        data = waiting.popleft()
        if waiting:
            lanes[lane] = waiting
        if not lanes:
            self._parts.popleft()
        return data
