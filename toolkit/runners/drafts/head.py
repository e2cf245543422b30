"""What a draft head is to the engine, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.runners.step import StepOutput

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Join = Callable[[F32], F32]
"""A linear that a runner computes: [rows, in] → [rows, out]."""
Words = Callable[[I64], F32]
"""Embeddings of tokens: [rows] → [rows, hidden]."""


@dataclass(frozen=True)
class Rows:
    """``count`` rows, the next of a text of which the head has kept ``kept``."""

    kept: Any
    count: int


@dataclass(frozen=True)
class Drawn:
    """Of each text's last row: what the next row is computed of besides its token, ``states`` [texts, hidden]; the
    likeliest token in the model's vocabulary, and the head's own chance that it is right, [texts]."""

    states: F32
    tokens: I64
    sure: NDArray[np.floating[Any]]


class Reader(Protocol):
    """What a draft head is. Of a text it keeps what ``open`` gives: ``first``, the number of its first row, ``length``,
    its rows, which may be cut, and ``nbytes`` in memory of their own. Row i is of the state at place i - 1 and the
    token at i."""

    name: str  # of the method, in metrics
    width: int  # of hidden states

    def open(self, first: int) -> Any: ...

    def grow(self, text: Any, count: int) -> bool:
        """Make room for ``count`` rows more; False where there is none."""

    def forget(self, text: Any) -> None:
        """Nothing more comes."""

    def fuse(self, states: F32) -> F32:
        """[rows, layers, hidden] of the model's hidden states -> [rows, hidden]."""

    def step(self, ids: I64, states: F32, rows: Sequence[Rows]) -> Drawn:
        """Rows of texts one after another, for which there is room: of each the token that came, [rows], and the state
        before it, fused or drawn, [rows, hidden]. Of each text's last row what comes next."""

    def release(self) -> None:
        """Give weights and cache back; no text is open."""

    def wake(self) -> None:
        """Undo ``release``."""

    def close(self) -> None:
        """Nothing is guessed any more."""


def chances(out: StepOutput) -> F32:
    """Of the tokens that a step drew, [rows], 0 where there is none to draw."""
    found: F32 = np.exp(np.minimum(out.logprob[:, 0], 0.0))
    found[out.bad_rows] = 0.0
    return found


def rms(x: F32, weight: F32, eps: float) -> F32:
    """RMS norm of rows [rows, numbers]."""
    found: F32 = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps)) * weight
    return found
