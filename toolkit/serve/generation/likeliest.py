"""A token's log-probabilities as answers tell them: the best ones, in order, as numbers of JSON."""

from __future__ import annotations

from collections.abc import Mapping


def likeliest(entry: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The ``count`` most probable ids, best first (the chosen token may stand beside them in ``entry``)."""
    return sorted(entry.items(), key=lambda item: (-item[1], item[0]))[:count]


def number(value: float) -> float:
    """A log-probability as JSON has it, which knows no -inf."""
    return max(value, -9999.0)
