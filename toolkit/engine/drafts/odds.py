"""How often guesses come true, by how they were made: of a request, of its user as long as it has few, and of most
users as long as that one has few.

What one user's guesses come to changes what is thought of that user's alone. A lookup's guesses are classed by
``place``; those of a model or a head by its own chance of a token, ``sureness``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """Where a guess is from: the request's own text, the answer that its client predicts, others' answers, or either of
    them behind a token that differed."""

    OWN = 0
    PREDICTED = 1
    SHARED = 2
    RESUMED = 3


_STEPS = (2, 3, 4, 6, 9, 17)  # tokens that agree before a guess, from which it counts as surer
_FIRST = (0.15, 0.3, 0.45, 0.55, 0.7, 0.8, 0.9)  # what is thought before anything was seen
_WEIGHT = 8.0  # guesses that what was thought before counts as
SHORT, LONG = 0.9, 0.995  # what a guess still counts after the next one: of a request, of a user
USERS = 64  # of whom something is known, those that last asked
JURY = 16  # of them, what of a new one is thought by
_SURE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # a draft's chance of a token, from which one is surer
ANY = len(_SURE) + 1  # the class of tokens of any sureness


class Odds:
    """``first``: of each class of guesses what is thought before any was seen; or ``above``: of the user's requests."""

    def __init__(self, first: Seq[float] = (), above: Odds | None = None) -> None:
        self._above = above
        self._first: Seq[float] = first if above is None else above._first
        self._keep = LONG if above is None else SHORT
        self._right = [0.0] * len(self._first)
        self._tried = [0.0] * len(self._first)

    def note(self, at: int, right: bool) -> None:
        """A token of class ``at`` was guessed."""
        self._right[at] = self._right[at] * self._keep + right
        self._tried[at] = self._tried[at] * self._keep + 1
        if self._above is not None:
            self._above.note(at, right)

    def of(self, at: int) -> float:
        """The chance that such a token is right."""
        before = self._first[at] if self._above is None else self._above.of(at)
        return (self._right[at] + _WEIGHT * before) / (self._tried[at] + _WEIGHT)

    def all(self) -> NDArray[np.float64]:
        """``of`` each class, of a user's."""
        return (np.array(self._right) + _WEIGHT * np.array(self._first)) / (np.array(self._tried) + _WEIGHT)


class Users:
    """The odds of each user, ``Whose.user``. ``first``: as of ``Odds``."""

    def __init__(self, first: Seq[float]) -> None:
        self._first = tuple(first)
        self._known: OrderedDict[str, Odds] = OrderedDict()

    def of(self, user: str) -> Odds:
        """Those of that user. Of a new one the median of the last others is thought: so none of them, whatever it asks
        for, moves it beyond what another one has."""
        if user in self._known:
            self._known.move_to_end(user)
            return self._known[user]
        others = [odds.all() for odds in list(self._known.values())[-JURY:]]
        found = self._known[user] = Odds(_median([self._first, self._first, *others]))
        if len(self._known) > USERS:
            self._known.popitem(last=False)
        return found


def _median(rows: Seq[Seq[float] | NDArray[np.float64]]) -> list[float]:
    """Of each column. ``np.median`` does it too, and imports numpy.ma for it, while somebody waits for an answer."""
    ordered = np.sort(np.array(rows), axis=0)
    return list(map(float, (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2))


def lookup_odds() -> Users:
    """Of guesses by ``place``."""
    return Users(_FIRST * len(Kind))


def place(kind: Kind, agreed: int) -> int:
    """The class of a token where ``agreed`` tokens before it were alike."""
    return kind * len(_FIRST) + bisect_right(_STEPS, agreed)


def sureness(chance: float) -> int:
    """The class of a token to which its draft gives that chance."""
    return bisect_right(_SURE, chance)


def compare(odds: Odds, guessed: Seq[int], sure: Seq[int], came: Seq[int]) -> int:
    """Note of each token guessed, of the classes ``sure``, whether it came, up to the first that did not; returns how
    many did."""
    for i, (guess, kind, token) in enumerate(zip(guessed, sure, came, strict=False)):
        for at in (kind, ANY):
            odds.note(at, guess == token)
        if guess != token:
            return i
    return min(len(guessed), len(came))
