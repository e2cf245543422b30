"""How far the predictions of two models are apart, token by token, from logits in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 700.0  # nats a token, of which exp is about the largest float: what is said of a model that has lost everything
ROWS = 128  # positions whose log-probabilities are held at once

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Divergence:
    """What was counted so far of two models A and B, an array for each ``add`` and in it a number for each token.

    ``kl``: KL(A ‖ B), nats. ``lost_a``, ``lost_b``: −log p of the token that followed. ``agreed``: tokens where both
    prefer the same next one. ``dtype``: of the logarithms; float64 tells apart models that hardly differ, float32 is
    several times faster.
    """

    def __init__(self, dtype: type[np.floating[Any]] = np.float64) -> None:
        self._dtype = dtype
        self.kl: list[F64] = []
        self.lost_a: list[F64] = []
        self.lost_b: list[F64] = []
        self.agreed = 0

    def add(self, a: F32, b: F32, targets: NDArray[np.int32]) -> None:
        """Count in a text: logits of both [tokens, vocabulary], and the tokens that followed [tokens]."""
        kl, lost_a, lost_b = (np.empty(len(targets)) for _ in range(3))
        for start in range(0, len(targets), ROWS):
            part = slice(start, start + ROWS)
            p, q = log_softmax(a[part], self._dtype), log_softmax(b[part], self._dtype)
            here, row = targets[part], np.arange(len(targets[part]))
            lost_a[part], lost_b[part] = -p[row, here], -q[row, here]
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            likely = np.exp(p)
            apart = np.where(likely > 0, p - q, 0)  # what A never says counts nothing, whatever B says of it
            kl[part] = np.einsum("tv,tv->t", likely, apart, dtype=np.float64)
        self.kl.append(kl)
        self.lost_a.append(lost_a)
        self.lost_b.append(lost_b)


def log_softmax(logits: F32, dtype: type[np.floating[Any]] = np.float64) -> NDArray[Any]:
    """Log-probabilities over the last axis, in ``dtype``; the sum of each row is taken in float64."""
    found = logits.astype(dtype)
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True, dtype=np.float64)).astype(dtype)
    return found


def perplexity_of(lost: float) -> float:
    """exp of the mean −log p of a token, as ``bounded``."""
    return math.exp(bounded(lost))


def bounded(nats: float) -> float:
    """``nats``, but ``MOST`` where they are more, or no number at all."""
    return nats if nats < MOST else MOST
