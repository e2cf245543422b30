"""What a step takes by the number of its rows, learned from the steps themselves, and how many guesses pay."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # numbers of rows, seconds of each
MOST_ROWS = 512  # beyond these a row costs what the last ones did
_FIRST_ROW = 0.1  # of a step of one row, what each further one is taken to cost before any was measured
_NEW = 0.25  # of what is kept, what the latest step makes; of the first steps each counts alike
_DRIFT = 0.3  # the power of a change with which other numbers of rows follow: contexts grow, other processes come
_SURPRISE = 3.0  # times what was expected, beyond which a step says nothing more
_NEAR = 16  # further rows, of which a step may have some more for next to nothing
PAYS = 1.03  # times the tokens a second without guesses, from which they are made: what is measured is not exact


class StepCost:
    """Seconds of steps without prompts, by rows."""

    def __init__(self) -> None:
        self._seconds = np.zeros(MOST_ROWS + 1)  # 0: not measured
        self._steps = np.zeros(MOST_ROWS + 1)  # that were measured, as far as they count
        self._curve: Curve | None = None
        self.known = False  # whether any step was measured

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long, the time between steps included."""
        rows = min(rows, MOST_ROWS)
        if seconds <= 0:
            return
        before = self._seconds[rows]
        if before:
            after = before + max(_NEW, 1 / (self._steps[rows] + 1)) * (min(seconds, _SURPRISE * before) - before)
            self._seconds *= (after / before) ** _DRIFT  # and back again as it goes back, so no entry runs away
        else:
            after = min(seconds, _SURPRISE * float(self.of(np.array([rows]))[0])) if self.known else seconds
        self._seconds[rows], self.known = after, True
        self._steps[rows] = min(self._steps[rows] + 1, 1 / _NEW)
        self._curve = None

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps of so many rows each; rising. Only once one was measured."""
        if self._curve is None:
            known = np.flatnonzero(self._seconds)
            self._curve = known, rising(self._seconds[known], self._steps[known])
        known, times = self._curve
        first, last = int(known[0]), int(known[-1])
        each = times[0] / (1 / _FIRST_ROW + first - 1)  # as if all had been measured alike
        if last > first:
            each = (times[-1] - times[0]) / (last - first)
        found = np.interp(rows, known, times)
        return found + np.maximum(rows - last, 0) * each


def rising(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The numbers nearest to ``values`` of which none is below the one before: where some are, their mean (pool
    adjacent violators). So one bad measurement of few rows makes no further ones look free."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, more, alike = pools.pop()
            value = (value * weight + other * more) / (weight + more)
            weight, count = weight + more, count + alike
        pools.append((value, weight, count))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])


def fastest(rates: NDArray[np.float64]) -> int:
    """Which of these tokens a second to choose, of 0, 1, 2 … guesses."""
    found = int(np.argmax(rates))
    return found if rates[found] > PAYS * rates[0] else 0


def worth(chances: list[list[float]], rows: int, room: int, cost: StepCost) -> list[int]:
    """How many tokens of each guess a step is to verify, so that it gives most tokens a second.

    ``chances`` of each request: of each token of its guess, given those before it. ``rows``: of the step without
    guesses, a token each; ``room``: further ones that it may have at most, below 0 where it has too many by itself.
    """
    gains = [list(accumulate(c, mul)) for c in chances]
    flat = np.array([gain for some in gains for gain in some])
    order = np.argsort(-flat, kind="stable")[: max(0, room)]
    tokens = rows + np.concatenate([[0.0], np.cumsum(flat[order])])
    chosen = fastest(tokens / cost.of(rows + np.arange(len(tokens))))
    counts = np.zeros(len(gains), np.int64)
    owners = np.repeat(np.arange(len(gains)), [len(g) for g in gains])
    np.add.at(counts, owners[order[:chosen]], 1)
    return [int(n) for n in counts]


def least_chance(rows: int, room: int, cost: StepCost) -> float:
    """The chance of a token below which no further row pays: what one adds to a step's time at least, as a share of
    the time of a token. ``rows``, ``room``: as of ``worth``; of the further rows only the first ones count."""
    more = np.arange(max(0, min(room, _NEAR)) + 1)
    seconds = cost.of(rows + more)
    return max(0.0, float(np.min((seconds[1:] / seconds[0] - 1) / more[1:], initial=1.0 / rows)) * rows)
