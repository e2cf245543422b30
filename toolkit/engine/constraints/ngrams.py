"""Noticing that an answer goes round in circles."""

from __future__ import annotations

from collections import Counter, deque


class RepeatedNgrams:
    """Counts every run of ``size`` neighbouring tokens of an answer; ``add`` says when one has come ``limit`` times."""

    def __init__(self, size: int, limit: int) -> None:
        self._limit = limit
        self._last: deque[int] = deque(maxlen=size)
        self._seen: Counter[tuple[int, ...]] = Counter()

    def add(self, token: int) -> bool:
        """Take the next generated token; True if the run that it ends is there for the ``limit``-th time or more."""
        self._last.append(token)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        run = tuple(self._last)
        self._seen[run] += 1
        return self._seen[run] >= self._limit
