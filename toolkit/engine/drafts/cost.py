"""What a step takes by the number of its rows, learned from the steps themselves, and how many guesses pay."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 512  # beyond these a row costs what the last ones did
_FIRST_ROW = 0.1  # of a step of one row, what each further one is taken to cost before any was measured
_NEW = 0.25  # of what is kept, what the latest step makes
_DRIFT = 0.05  # likewise of other numbers of rows: contexts grow, other processes come
_SURPRISE = 3.0  # times what was expected, beyond which a step says nothing more


class StepCost:
    """Seconds of steps without prompts, by rows."""

    def __init__(self) -> None:
        self._seconds = np.zeros(MOST_ROWS + 1)  # 0: not measured

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long, the time between steps included."""
        rows = min(rows, MOST_ROWS)
        if seconds <= 0:
            return
        before = self._seconds[rows]
        if not before:
            known = self._seconds.any()
            expected = float(self.of(np.array([rows]))[0]) if known else seconds
            self._seconds[rows] = min(seconds, _SURPRISE * expected)
            return
        seconds = min(seconds, _SURPRISE * before)
        self._seconds *= 1 + _DRIFT * (max(0.5, seconds / before) - 1)
        self._seconds[rows] = before + _NEW * (seconds - before)

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps of so many rows each; rising. Only once one was measured."""
        known = np.flatnonzero(self._seconds)
        times = np.maximum.accumulate(self._seconds[known])
        first, last = int(known[0]), int(known[-1])
        each = times[0] / (1 / _FIRST_ROW + first - 1)  # as if all had been measured alike
        if last > first:
            each = (times[-1] - times[0]) / (last - first)
        found = np.interp(rows, known, times)
        return found + np.maximum(rows - last, 0) * each

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._seconds.any())


def worth(chances: list[list[float]], rows: int, room: int, cost: StepCost) -> list[int]:
    """How many tokens of each guess a step is to verify, so that it gives most tokens a second.

    ``chances`` of each request: of each token of its guess, given those before it. ``rows``: of the step without
    guesses, a token each; ``room``: further ones that it may have at most.
    """
    gains = [list(accumulate(c, mul)) for c in chances]
    flat = np.array([gain for some in gains for gain in some])
    order = np.argsort(-flat, kind="stable")[: max(0, room)]
    tokens = rows + np.concatenate([[0.0], np.cumsum(flat[order])])
    best = int(np.argmax(tokens / cost.of(rows + np.arange(len(tokens)))))
    counts = np.zeros(len(gains), np.int64)
    owners = np.repeat(np.arange(len(gains)), [len(g) for g in gains])
    np.add.at(counts, owners[order[:best]], 1)
    return [int(n) for n in counts]
