"""Messages on their way into a pipe: whoever sends one never waits for the reader."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

MAX_UNSENT = 256 << 20  # bytes that wait, from which on it is full


class Outbox:
    """Writes what ``put`` takes in a thread of its own, in order. A pipe that broke swallows the rest in silence: who
    reads from the other end notices first."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="toolkit-engine-outbox", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether so much waits that no more requests should be sent."""
        return self._bytes > MAX_UNSENT

    def put(self, data: bytes) -> None:
        """Take a message."""
        with self._changed:
            if not self._closed:
                self._waiting.append(data)
                self._bytes += len(data)
                self._changed.notify()

    def close(self) -> None:
        """Drop what waits and end the thread; one that is writing ends when the pipe breaks."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                data = self._waiting.popleft()
            with suppress(OSError, ValueError):
                self._pipe.send_bytes(data)
            with self._changed:
                self._bytes -= len(data)
