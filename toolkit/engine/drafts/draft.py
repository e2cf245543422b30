"""What a draft is: something that guesses how a request goes on. What it says is verified, whatever it is."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.sequence import Sequence

if TYPE_CHECKING:
    from toolkit.engine.step import Step
    from toolkit.runners.step import StepOutput


@dataclass(frozen=True)
class Guess:
    """``tokens``: those that come next, perhaps; ``chances``: of each, 0 to 1, given that those before it are right.
    Lists, not arrays: they are short, and made for every request in every step."""

    tokens: list[int]
    chances: list[float]


NO_GUESS = Guess([], [])


@dataclass(frozen=True)
class Outlook:
    """What guesses promise and cost before they are made, of some requests together.

    ``chances``: of each request's tokens, given that those before are right, [requests]. ``seconds``: what guesses of
    0, 1, 2 … tokens take to make, [most + 1].
    """

    chances: NDArray[np.float64]
    seconds: NDArray[np.float64]


class Draft:
    """``name``: of the method, in metrics. ``costs``: guesses take time to make, so that ``outlook`` is asked before
    ``propose`` is. ``aux_layers``: of the model whose inputs come back from every step, for ``observe``;
    ``aux_newest``: of a prompt's tokens only those of the last in a step. ``least``: the chance of a token, and of all
    before it, below which it does not pay now, its row and where it ``costs`` the time to make it; guesses that promise
    less need not be made. One engine's thread owns a draft."""

    name: str
    costs: bool = False
    aux_layers: tuple[int, ...] = ()
    aux_newest: bool = False
    least: float = 0.0

    def outlook(self, asked: Seq[tuple[Sequence, int]]) -> Outlook:
        """What guesses of up to so many tokens for all of these requests promise; only where they cost."""
        raise NotImplementedError

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """For each request a guess of up to so many tokens behind its known ones, ``tokens[:known]``."""
        raise NotImplementedError

    def pays_behind(self, chances: Seq[float], usual: float) -> bool:
        """Whether one more token pays behind those of a guess, if it is as likely as ``usual``."""
        return math.prod(chances) * usual > self.least

    def observe(self, step: Step, out: StepOutput) -> None:
        """A step's tokens have been given to its requests, those of guesses too."""

    def forget(self, seq: Sequence) -> None:
        """The request has ended."""

    def rest(self) -> None:
        """Give memory back, as the engine sleeps; no request runs."""

    def wake(self) -> None:
        """Undo ``rest``. Raises RunnerError or MemoryError where that fails."""

    def close(self) -> None:
        """Nothing is asked any more."""
