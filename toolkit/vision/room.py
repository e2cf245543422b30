"""Bytes that many may hold together, and no more of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.errors import BusyError


class Room:
    """``most`` bytes; ``name``: the option that says how many. Thread-safe."""

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.held = 0
        self.highest = 0  # that was ever held
        self.name = name
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def of(self, size: int, seconds: float, what: str) -> Iterator[None]:
        """Inside ``size`` bytes are held. Who comes first is let in first; who needs more than there is, alone. Raises
        BusyError, which names ``what`` waited, after ``seconds``."""
        self._enter(size, seconds, what)
        try:
            yield
        finally:
            self.give(size)

    def take(self, size: int, what: str) -> None:
        """Hold ``size`` more bytes, until ``give``. Raises BusyError where there are none left."""
        with self._changed:
            if self.held + size > self.most:
                raise BusyError(f"{what}: others fill the server's {self.name}; try again later")
            self._hold(size)

    def give(self, size: int) -> None:
        """Hold ``size`` bytes less."""
        with self._changed:
            self.held -= size
            self._changed.notify_all()

    def _enter(self, size: int, seconds: float, what: str) -> None:
        until, me = time.monotonic() + seconds, object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or (self.held and self.held + size > self.most):
                    if (left := until - time.monotonic()) <= 0:
                        raise BusyError(f"{what}: others fill the server's {self.name}; try again later")
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                self._hold(size)
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _hold(self, size: int) -> None:
        self.held += size
        self.highest = max(self.highest, self.held)
