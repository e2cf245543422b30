"""How work grows with its size: a ratio of two times, which a slow or busy machine lengthens alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LEAST = 0.005  # seconds below which a time says nothing


def growth(work: Callable[[int], Any], size: int) -> float:
    """Processor time of ``work(4 * size)`` over that of ``work(size)``: 4 where it is linear, 16 where it is a square.

    The least of some attempts: what else the machine does can make either of the two longer.
    """

    def seconds(size: int) -> float:
        begun = time.thread_time()
        work(size)
        return max(time.thread_time() - begun, LEAST)

    found = []
    while len(found) < 5 and min(found, default=16.0) > 6:
        found.append(seconds(4 * size) / seconds(size))
    return min(found)
