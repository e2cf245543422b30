"""How often guesses come true, by how they were made: of a request, and of all as long as it has few."""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum


class Kind(IntEnum):
    """Where a guess is from: the request's own text, the answer that its client predicts, others' answers, or either of
    them behind a token that differed."""

    OWN = 0
    PREDICTED = 1
    SHARED = 2
    RESUMED = 3


_STEPS = (2, 3, 4, 6, 9, 17)  # tokens that agree before a guess, from which it counts as surer
_CLASSES = len(_STEPS) + 1
_FIRST = (0.15, 0.3, 0.45, 0.55, 0.7, 0.8, 0.9)  # what is thought before anything was seen
_WEIGHT = 4.0  # guesses that what was thought before counts as
SHORT, LONG = 0.9, 0.995  # what a guess still counts after the next one: of a request, of all


class Odds:
    """``above``: of all requests, None for that itself."""

    def __init__(self, above: Odds | None = None) -> None:
        self._above = above
        self._keep = LONG if above is None else SHORT
        self._right = [0.0] * (len(Kind) * _CLASSES)
        self._tried = [0.0] * (len(Kind) * _CLASSES)

    def note(self, kind: Kind, agreed: int, right: bool) -> None:
        """A token was guessed where ``agreed`` tokens before it were alike."""
        at = _class(kind, agreed)
        self._right[at] = self._right[at] * self._keep + right
        self._tried[at] = self._tried[at] * self._keep + 1
        if self._above is not None:
            self._above.note(kind, agreed, right)

    def of(self, kind: Kind, agreed: int) -> float:
        """The chance that such a token is right."""
        return self._of(_class(kind, agreed))

    def _of(self, at: int) -> float:
        before = _FIRST[at % _CLASSES] if self._above is None else self._above._of(at)
        return (self._right[at] + _WEIGHT * before) / (self._tried[at] + _WEIGHT)


def _class(kind: Kind, agreed: int) -> int:
    return kind * _CLASSES + bisect_right(_STEPS, agreed)
