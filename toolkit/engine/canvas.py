"""Blocks of tokens that are guessed together, in several passes (block diffusion).

A request of a model with a ``mask_token`` has a canvas: the block of positions that its next tokens stand in, with the
mask token where one is not known yet. Each step computes the whole block, draws a token for every mask, and keeps some
of them; what is kept stays. When no mask is left the block's tokens are the request's, and the next block begins. Its
first pass also computes the block before as it has become, whose keys and values the cache then keeps: those of a block
with masks are overwritten by the next pass. Source: Cheng et al., "SDAR" (arXiv 2510.06303), ``generate.py``.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.unmasking import Unmasking

PASS_BITS = 40  # a draw's position: that of its token in the low bits, above them the pass


@dataclass
class Canvas:
    """``first``: the position of its first token, a multiple of ``length``; ``masked`` [length]: which are not known;
    ``logprobs``: of those that are, where asked for; ``passes``: steps that guessed some of them so far.
    """

    length: int
    mask_token: int
    unmasking: Unmasking
    first: int = 0
    passes: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    masked: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.first + self.length

    def begin(self, tokens: NDArray[np.int32]) -> None:
        """The block that comes next after ``tokens``, all of a request; its known ones stand in it."""
        known = len(tokens) % self.length
        self.first, self.passes = len(tokens) - known, 0
        self.tokens = np.full(self.length, self.mask_token, np.int32)
        self.tokens[:known] = tokens[self.first :]
        self.masked = np.arange(self.length) >= known
        self.logprobs = [{}] * self.length

    def places(self) -> NDArray[np.int64]:
        """Those in the block that a pass draws tokens for."""
        return np.flatnonzero(self.masked)

    def keep(self, drawn: NDArray[np.int32], probability: NDArray[np.float32]) -> NDArray[np.int64]:
        """End a pass: which of ``places`` (counted among them) stay what was drawn there, by how probable it was."""
        chosen = chosen_of(probability, self.unmasking, self._due())
        where = self.places()[chosen]
        self.tokens[where] = drawn[chosen]
        self.masked[where] = False
        self.passes += 1
        return chosen

    def _due(self) -> int:
        """Tokens that this pass keeps at least: a block's are shared out over the steps, the first take the rest."""
        steps = self.unmasking.steps or self.length
        return max(1, self.length // steps + (self.passes < self.length % steps))


def chosen_of(probability: NDArray[np.float32], unmasking: Unmasking, due: int) -> NDArray[np.int64]:
    """Which of the guesses of these probabilities are kept, in rising order, at least ``due`` if there are as many."""
    if unmasking.strategy == "sequential":
        return np.arange(min(due, len(probability)))
    sure = np.flatnonzero(probability > unmasking.threshold)
    if unmasking.strategy == "low_confidence_dynamic" and len(sure) >= due:
        return sure
    return np.sort(np.argsort(-probability, kind="stable")[:due])
