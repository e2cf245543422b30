"""Whether a process that has work gets on with it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stall:
    """Tells a slow process from one that hangs: the slow one computes, or waits for a disk.

    ``patience``: seconds of neither messages (``sign``) nor processor time after which ``hung`` is true; a look that
    comes late, because the whole machine stood still, counts for no more than any other.
    """

    LOOK = 1.0  # seconds that one look without progress counts at most

    def __init__(self, pid: int, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience = patience
        self._pid = pid
        self._clock = clock
        self._looked = clock()
        self._signs = 0
        self._seen: tuple[int, float] | None = None  # signs and processor time at the last look
        self._still = 0.0

    def sign(self) -> None:
        """The process has said something."""
        self._signs += 1

    def hung(self, busy: bool) -> bool:
        """Look at the process, about every second; ``busy``: it has work."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, self.LOOK), now
        seen = (self._signs, self._computed())
        if not busy or seen != self._seen:
            self._still = 0.0
        else:
            self._still += passed
        self._seen = seen
        return bool(self.patience) and self._still >= self.patience

    def _computed(self) -> float:
        """Seconds of processor time so far; of one that waits for a disk ever another number."""
        import psutil  # only where the engine has a process of its own

        try:
            process = psutil.Process(self._pid)
            if process.status() == psutil.STATUS_DISK_SLEEP:
                return self._clock()
            times = process.cpu_times()
        except psutil.Error:
            return -1.0
        return times.user + times.system
