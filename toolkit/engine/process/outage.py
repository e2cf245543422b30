"""Why an engine is down, and how often it may be started again."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable

from toolkit.base.lazy_dataclass import dataclass

RESTARTS = 5  # starts in RESTART_WINDOW after which an engine that still fails is given up
RESTART_WINDOW = 600.0  # seconds
PATIENCE = 10.0  # seconds without a sign of life after which an engine with work counts as hung


@dataclass(frozen=True)
class Outage:
    """``why``: one line. ``restarting``: it comes back by itself."""

    why: str
    restarting: bool

    def __str__(self) -> str:
        what = "is being restarted; try again" if self.restarting else "has been given up; start it again"
        return f"the engine failed ({self.why}) and {what}"


class Budget:
    """How many restarts are left: ``RESTARTS`` in any ``RESTART_WINDOW`` seconds, however well it ran in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: deque[float] = deque()

    def spend(self) -> bool:
        """Take one restart; False where none is left."""
        now = self._clock()
        while self._spent and now - self._spent[0] > RESTART_WINDOW:
            self._spent.popleft()
        if len(self._spent) >= RESTARTS:
            return False
        self._spent.append(now)
        return True

    @property
    def pause(self) -> float:
        """Seconds to wait before the next try, longer the more there have been: a cause that is still there."""
        return min(2.0 ** max(len(self._spent) - 1, 0) - 1, 10.0)


def exit_text(code: int) -> str:
    """How a process ended, in words, from its exit code as ``subprocess`` has it."""
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": ", as the system does where memory runs out",
        "SIGBUS": ", as where a file that is mapped was shortened",
    }.get(name, "")
    return f"its process was ended by {name}{hint}"
