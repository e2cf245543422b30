"""How long a step of an engine takes, by what is in it; found by least squares from measured runs.

    seconds = start + work(tokens) + context · tokens that decoding requests read + pairs · (token, token before it)
        + row · requests that get a token

``work`` grows along a line that may bend at ``knots``: a step of few tokens waits for the weights, one of many for the
products, and both cost more the more tokens there are. No coefficient is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass

Features = NDArray[np.float64]


@dataclass(frozen=True)
class StepTime:
    """``knots``: tokens of a step, ascending, at which ``slopes`` change (one more of them: before the first, between,
    after the last); seconds. ``wait``: of a request outside of steps: HTTP, tokenizing, the way to the engine."""

    start: float
    knots: tuple[float, ...]
    slopes: tuple[float, ...]
    context: float = 0.0
    pairs: float = 0.0
    wait: float = 0.0
    row: float = 0.0

    def seconds(self, tokens: float, context: float = 0.0, pairs: float = 0.0, rows: float = 0.0) -> float:
        """Of one step: ``tokens`` of prompts and decoding requests, ``context`` tokens that the latter read,
        ``rows`` requests that get a token."""
        found, before = self.start + self.row * rows, 0.0
        for knot, slope in zip((*self.knots, float("inf")), self.slopes, strict=True):
            if tokens <= knot:
                return found + slope * (tokens - before) + self.context * context + self.pairs * pairs
            found += slope * (knot - before)
            before = knot
        raise AssertionError("the last line goes on for ever")

    def times(self, factor: float) -> StepTime:
        """On a machine that takes so many times as long."""
        return StepTime(
            self.start * factor, self.knots, tuple(s * factor for s in self.slopes), self.context * factor,
            self.pairs * factor, self.wait, self.row * factor,
        )  # fmt: skip


def features(knots: Sequence[float], tokens: float, context: float, pairs: float, rows: float) -> Features:
    """What ``StepTime`` multiplies with its coefficients: one step, then its tokens between each two knots, context,
    pairs, rows."""
    edges = (0.0, *knots, float("inf"))
    parts = [max(0.0, min(tokens, high) - low) for low, high in pairwise(edges)]
    return np.array([1.0, *parts, context, pairs, rows])


def made(knots: Sequence[float], coefficients: Sequence[float], wait: float = 0.0) -> StepTime:
    """From coefficients in the order of ``features``."""
    start, *slopes, context, pairs, row = (float(x) for x in coefficients)
    return StepTime(start, tuple(knots), tuple(slopes), context, pairs, wait, row)


def non_negative(matrix: Features, target: Features) -> Features:
    """The x >= 0 for which ``matrix @ x`` is nearest to ``target`` (Lawson and Hanson, Solving Least Squares Problems,
    1974, chapter 23)."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    scaled = matrix / scale
    count = scaled.shape[1]
    found, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gain = scaled.T @ (target - scaled @ found)
        gain[passive] = -np.inf
        if gain.max() <= 1e-10 * max(1.0, float(np.abs(target).max())):
            break
        passive[int(gain.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if not passive.any() or trial[passive].min() > 0:
                break
            bad = passive & (trial <= 0)
            step = (found[bad] / np.maximum(found[bad] - trial[bad], 1e-300)).min()
            found = found + step * (trial - found)
            passive &= found > 1e-14
            found[~passive] = 0.0
        found = trial
    result: Features = found / scale
    return result
