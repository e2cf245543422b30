"""Waking many consumers on one event loop from another thread with one call."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:  # not for one answer in a terminal
    import asyncio


class Bell:
    """Sets asyncio events from any thread; events rung in one go cost one call into their loop, which it does not hold:
    a program may run one after another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._rung: deque[asyncio.Event] = deque()
        self._scheduled = False

    def ring(self, event: asyncio.Event) -> None:
        """Have ``event`` set soon. Raises RuntimeError once the loop is closed."""
        if (loop := self._loop()) is None:
            raise RuntimeError("the event loop is gone")
        self._rung.append(event)
        if not self._scheduled:
            self._scheduled = True
            try:
                loop.call_soon_threadsafe(self._set_all)
            except BaseException:
                self._scheduled = False
                raise

    def _set_all(self) -> None:
        self._scheduled = False  # first: what is rung from here on schedules anew, or is seen by the loop below
        while self._rung:
            self._rung.popleft().set()
