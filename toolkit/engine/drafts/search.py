"""Where in a text its end, or another's, has stood before.

A suffix automaton takes more time to keep than it saves: numpy compares 8,000 tokens in the time in which Python adds
one to it. So a request's own text is searched as it is, only when nothing is being copied, and only where its last two
tokens have stood side by side before. Answers of others are found by their last three tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IDs = NDArray[np.int32]
LONGEST = 32  # tokens that are compared at most
_PLACES = 4096  # that are looked at, the last ones: of a token that is everywhere
_GRAM = 3
_BITS = 21  # of a token id, in a key of three
_ODD, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_PLACES_BITS = 18  # of the table of an ``Answers``: some places are taken by others' threes, which are compared
_MOST_BITS = 14  # of the table of a ``Newest``
BORDER = -1  # between two answers, in an ``Answers``
_LEAD = 8  # tokens of the prompt that stand before an answer


def longest(text: IDs, tail: IDs, behind: int = -1) -> tuple[int, int]:
    """(the place in ``text`` behind the longest row of tokens there that ``tail`` ends with, its length); the last of
    such places, or the first from ``behind`` on where that is given. (0, 0) where there is none."""
    if len(text) < 2 or not len(tail):
        return 0, 0
    found = np.flatnonzero(text[:-1] == tail[-1])[-_PLACES:]
    if not len(found):
        return 0, 0
    length = 1
    while length < min(LONGEST, len(tail)):
        more = found[found >= length]
        more = more[text[more - length] == tail[-1 - length]]
        if not len(more):
            break
        found, length = more, length + 1
    at = int(found[-1])
    if behind >= 0 and len(later := found[found + 1 >= behind]):
        at = int(later[0])
    return at + 1, length


def pair(first: int, second: int) -> int:
    """Two tokens side by side, as one number."""
    return (first << _BITS) + second


def pairs(tokens: IDs) -> NDArray[np.int64]:
    """All of a text, in order."""
    ids = tokens.astype(np.int64)
    return (ids[:-1] << _BITS) + ids[1:]


class Seen:
    """Which numbers have been seen, with room for so many: perhaps one in four more than were. A byte takes the place
    of a number in a set, which would take a hundred, and milliseconds of each long prompt."""

    def __init__(self, numbers: NDArray[np.int64], room: int = 0) -> None:
        self._bits = _bits_for(max(room, len(numbers)))
        self._table = np.zeros(1 << self._bits, np.bool_)
        self._table[_spread(numbers, self._bits)] = True

    def add(self, number: int) -> None:
        self._table[_place(number, self._bits)] = True

    def __contains__(self, number: int) -> bool:
        return bool(self._table[_place(number, self._bits)])


class Newest:
    """Behind which place of a text each of its tokens stands last. Some may be taken for another that came later: the
    table stays small, for there is one a request, and texts have few tokens that differ."""

    def __init__(self, tokens: IDs, room: int) -> None:
        self._bits = min(_bits_for(room), _MOST_BITS)
        self._places: IDs = np.zeros(1 << self._bits, np.int32)
        self._places[_spread(tokens, self._bits)] = np.arange(1, len(tokens) + 1)

    def add(self, token: int, place: int) -> None:
        """It stands before this place."""
        self._places[_place(token, self._bits)] = place

    def of(self, token: int) -> int:
        """The place, 0 where it has not stood."""
        return int(self._places[_place(token, self._bits)])


def _bits_for(numbers: int) -> int:
    """Of a table that has four places or more for each of so many."""
    return max(10, (4 * numbers).bit_length())


def _spread(numbers: NDArray[np.int64] | IDs, bits: int) -> NDArray[np.uint64]:
    """A place of ``bits`` bits for each number."""
    spread: NDArray[np.uint64] = numbers.astype(np.uint64) * np.uint64(_ODD)
    return spread >> np.uint64(64 - bits)


def _place(number: int, bits: int) -> int:
    """The same of one."""
    return (number * _ODD & _WORD) >> (64 - bits)


class Answers:
    """The last answers of a user, ``room`` tokens in all, the oldest forgotten first."""

    def __init__(self, room: int = 1 << 16) -> None:
        self.tokens: IDs = np.full(room, BORDER, np.int32)
        self._end = 0
        self._places: IDs = np.zeros(1 << _PLACES_BITS, np.int32)  # of three tokens: the newest place behind them

    def add(self, prompt: IDs, answer: IDs) -> None:
        """Keep an answer behind the end of its prompt."""
        room = len(self.tokens)
        new = np.concatenate([prompt[-_LEAD:], answer[-(room // 4) :], np.array([BORDER], np.int32)]).astype(np.int32)
        if self._end + len(new) > room:
            self._end = 0
        start, self._end = self._end, self._end + len(new)
        self.tokens[start : self._end] = new
        if self._end < room:  # the rest of the one that is written over begins in its middle
            self.tokens[self._end] = BORDER
        ids = new.astype(np.int64)
        keys = (ids[:-3] << 2 * _BITS) + (ids[1:-2] << _BITS) + ids[2:-1]
        self._places[_spread(keys, _PLACES_BITS)] = np.arange(start + _GRAM, start + _GRAM + len(keys))

    def _is(self, key: int, at: int) -> bool:
        a, b, c = self.tokens[at - _GRAM : at].tolist()
        return (a << 2 * _BITS) + (b << _BITS) + c == key and min(a, b, c) >= 0

    def find(self, tail: IDs) -> tuple[int, int]:
        """As ``longest``, in all answers: at least three tokens, or (0, 0)."""
        if len(tail) < _GRAM:
            return 0, 0
        a, b, c = tail[-_GRAM:].tolist()
        key = (a << 2 * _BITS) + (b << _BITS) + c
        at = int(self._places[_place(key, _PLACES_BITS)])
        if not at or not self._is(key, at):
            return 0, 0
        length, most = _GRAM, min(LONGEST, len(tail), at)
        while length < most and self.tokens[at - 1 - length] == tail[-1 - length]:
            length += 1
        return at, length
