"""What the rows of a guess are drawn by: penalties, biases and masks as they would be had its tokens come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.sequence import Biases, Counted, Sequence

if TYPE_CHECKING:
    from toolkit.engine.constraints.grammar import Mark


@dataclass
class Fixed:
    """Stands for a request's bad words, or its grammar, at one place of a guess."""

    ids: NDArray[np.int32]  # those ruled out, or a bit each of those allowed

    def banned(self) -> NDArray[np.int32]:
        return self.ids

    def fill(self, mask: NDArray[np.int32], row: int, among: int = 1, left: int = 0) -> None:
        mask[row] = self.ids


@dataclass
class Place:
    """One row of a guess, as ``StepBuilder`` asks a request for what its token is drawn by."""

    row: int
    left: int
    history: Counted | None
    biases: Biases | None
    bad_words: Fixed | None
    grammar: Fixed | None
    mark: Mark | None  # of the grammar


def places(seq: Sequence, count: int, words: int, among: int) -> list[Place]:
    """A place for each row of the guess of ``count`` tokens behind a request's known ones, of which those are left out
    that could not come, and those behind them. What it is drawn by is left as it was. ``words``: of a mask; ``among``:
    grammars of this step."""
    guess = seq.tokens[seq.length : seq.length + count].tolist()
    found: list[Place] = []
    with supposing(seq) as supposed:
        for i in range(count + 1):
            mask = None
            if seq.grammar is not None:
                mask = np.full((1, words), -1, np.int32)
                seq.grammar.fill(mask, 0, among, seq.left - i)
            found.append(_place(seq, seq.left - i, None if mask is None else mask[0]))
            if i == count or (seq.grammar is not None and not _goes_on(seq, guess[i], found[-1])):
                break
            if seq.history is not None:
                seq.history.add(guess[i])
            if seq.bad_words is not None:
                seq.bad_words.add(guess[i])
            supposed.append(guess[i])
    return found


@contextmanager
def supposing(seq: Sequence) -> Iterator[list[int]]:
    """What a request's tokens are drawn by is at the end what it was before. To the list go the tokens that are added
    to its history meanwhile."""
    history = None if seq.history is None else seq.history.copy()
    bad_words = None if seq.bad_words is None else seq.bad_words.mark()
    mark = None if seq.grammar is None else seq.grammar.mark()
    added: list[int] = []
    try:
        yield added
    finally:
        if seq.history is not None and history is not None:
            seq.history.back(history, added)
        if seq.bad_words is not None and bad_words is not None:
            seq.bad_words.back(bad_words)
        if seq.grammar is not None and mark is not None:
            seq.grammar.back(mark)


def _place(seq: Sequence, left: int, mask: NDArray[np.int32] | None) -> Place:
    return Place(
        seq.row,
        left,
        None if seq.history is None else seq.history.copy(),
        seq.biases,
        None if seq.bad_words is None else Fixed(seq.bad_words.banned()),
        None if mask is None else Fixed(mask),
        None if seq.grammar is None else seq.grammar.mark(),
    )


def _goes_on(seq: Sequence, token: int, place: Place) -> bool:
    """Whether the text goes on behind this token of a guess; its grammar then has it."""
    assert seq.grammar is not None and place.grammar is not None
    if seq.grammar.failure is not None or token in seq.grammar.stops:
        return False
    return (
        seq.grammar.allows(place.grammar.ids, token) and not seq.grammar.accept(token) and seq.grammar.failure is None
    )
