"""What a step takes by the number of its rows, learned from the steps themselves, and how many guesses pay."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 512  # beyond these a row costs what the last ones did
_FIRST_ROW = 0.1  # of a step of one row, what each further one is taken to cost before any was measured
_NEW = 0.25  # of what is kept, what the latest step makes; of the first steps each counts alike
_DRIFT = 0.3  # the power of a change with which other numbers of rows follow: contexts grow, other processes come
_SURPRISE = 3.0  # times what was expected, beyond which a step says nothing more
_NEAR = 16  # further rows, of which a step may have some more for next to nothing
PAYS = 1.03  # times the tokens a second without guesses, from which they are made: what is measured is not exact


class StepCost:
    """Seconds of steps without prompts, by rows. Between two steps each of these numbers is looked at, and of numpy's
    code nothing is left in the caches then: so they are lists."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, float]] = {}  # seconds, and how many steps they count as
        self._curve: list[float] = []  # of 0, 1, 2 … rows, as far as somebody has asked
        self.known = False  # whether any step was measured

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long, the time between steps included."""
        rows = min(rows, MOST_ROWS)
        if seconds <= 0:
            return
        before, steps = self._measured.get(rows, (0.0, 0.0))
        if before:
            after = before + max(_NEW, 1 / (steps + 1)) * (min(seconds, _SURPRISE * before) - before)
            follow = (after / before) ** _DRIFT  # and back again as it goes back, so no entry runs away
            self._measured = {n: (value * follow, count) for n, (value, count) in self._measured.items()}
        else:
            after = min(seconds, _SURPRISE * self.upto(rows)[rows]) if self.known else seconds
        self._measured[rows], self.known = (after, min(steps + 1, 1 / _NEW)), True
        self._curve = []

    def upto(self, rows: int) -> Seq[float]:
        """Seconds of steps of 0, 1, 2 … at least ``rows`` rows; rising. Only once one was measured."""
        if len(self._curve) <= rows:
            self._curve = self._anew(rows)
        return self._curve

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """``upto``, of steps of so many rows each."""
        return np.array(self.upto(int(rows.max(initial=0))))[rows]

    def _anew(self, most: int) -> list[float]:
        known = sorted(self._measured)
        times = rising([self._measured[n] for n in known])
        first, last = known[0], known[-1]
        each = times[0] / (1 / _FIRST_ROW + first - 1)  # as if all had been measured alike
        if last > first:
            each = (times[-1] - times[0]) / (last - first)
        found = [times[0]] * (first + 1)
        for i in range(1, len(known)):
            start, end = known[i - 1], known[i]
            slope = (times[i] - times[i - 1]) / (end - start)
            found += [times[i - 1] + slope * n for n in range(1, end - start)]
            found.append(times[i])
        return found + [times[-1] + each * n for n in range(1, most - last + 1)]


def rising(measured: list[tuple[float, float]]) -> list[float]:
    """The numbers nearest to the (values, weights) ``measured`` of which none is below the one before: where some are,
    their mean (pool adjacent violators). So one bad measurement of few rows makes no further ones look free."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in measured:
        count = 1
        while pools and pools[-1][0] > value:
            other, more, alike = pools.pop()
            value = (value * weight + other * more) / (weight + more)
            weight, count = weight + more, count + alike
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def fastest(rates: Seq[float]) -> int:
    """Which of these tokens a second to choose, of 0, 1, 2 … guesses."""
    found = max(range(len(rates)), key=rates.__getitem__)
    return found if rates[found] > PAYS * rates[0] else 0


def worth(chances: list[list[float]], rows: int, room: int, cost: StepCost) -> list[int]:
    """How many tokens of each guess a step is to verify, so that it gives most tokens a second.

    ``chances`` of each request: of each token of its guess, given those before it. ``rows``: of the step without
    guesses, a token each; ``room``: further ones that it may have at most, below 0 where it has too many by itself.
    """
    gains = [(gain, i) for i, some in enumerate(chances) for gain in accumulate(some, mul)]
    gains.sort(key=lambda gain: -gain[0])
    del gains[max(0, room) :]
    seconds = cost.upto(rows + len(gains))
    tokens = accumulate((gain for gain, _ in gains), initial=float(rows))
    chosen = fastest([some / seconds[rows + i] for i, some in enumerate(tokens)])
    counts = [0] * len(chances)
    for _, i in gains[:chosen]:
        counts[i] += 1
    return counts


def least_chance(rows: int, room: int, cost: StepCost) -> float:
    """The chance of a token below which no further row pays: what one adds to a step's time at least, as a share of
    the time of a token. ``rows``, ``room``: as of ``worth``; of the further rows only the first ones count."""
    most = max(0, min(room, _NEAR))
    seconds = cost.upto(rows + most)
    least = min(((seconds[rows + n] / seconds[rows] - 1) / n for n in range(1, most + 1)), default=1.0 / rows)
    return max(0.0, min(least, 1.0 / rows)) * rows
