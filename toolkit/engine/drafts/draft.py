"""What a draft is: something that guesses how a request goes on. What it says is verified, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from toolkit.engine.sequence import Sequence


@dataclass(frozen=True)
class Guess:
    """``tokens``: those that come next, perhaps; ``chances``: of each, 0 to 1, given that those before it are right.
    Lists, not arrays: they are short, and made for every request in every step."""

    tokens: list[int]
    chances: list[float]


NO_GUESS = Guess([], [])


class Draft(Protocol):
    """``seconds``: what a token of a guess takes to make, of all requests of a step together; 0 where that is nothing
    beside a step. One engine's thread owns a draft."""

    name: str
    seconds: float

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """For each request a guess of up to so many tokens behind its known ones, ``tokens[:known]``."""
        ...

    def learn(self, seq: Sequence, guessed: int, right: int) -> None:
        """A step has verified ``guessed`` tokens of this request, of which the first ``right`` were."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The request has ended."""
        ...
