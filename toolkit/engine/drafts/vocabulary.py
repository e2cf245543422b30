"""Which tokens of a draft model stand for which of its target's."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass

IDs = NDArray[np.int32]
NONE = -1
LEAST = 0.9  # of the target's tokens, that a draft has to know


@dataclass(frozen=True)
class Vocabulary:
    """``to_draft`` [target's vocabulary], of tokens that the draft does not know ``NONE``; ``to_target`` [draft's
    vocabulary] likewise. ``same``: both models have the same ids for the same tokens, and as many."""

    to_draft: IDs
    to_target: IDs
    same: bool

    def read(self, tokens: IDs) -> IDs:
        """The draft's tokens for some of the target's; what it does not know it reads as its first one."""
        return np.maximum(self.to_draft[tokens], 0)


def equal(target: int, draft: int) -> Vocabulary:
    """Of models with the same tokenizer and so many rows; what is beyond its tokens fills them up."""
    here, there = np.arange(target, dtype=np.int32), np.arange(draft, dtype=np.int32)
    return Vocabulary(np.where(here < draft, here, NONE), np.where(there < target, there, NONE), target == draft)


def by_text(target: Seq[bytes], draft: Seq[bytes], rows: tuple[int, int]) -> tuple[Vocabulary, float]:
    """Of models with tokenizers of these tokens, and so many rows: (the vocabulary, what share of the target's tokens
    the draft knows). Of tokens with the same text the first ones stand for each other."""
    known: dict[bytes, int] = {}
    for i, text in enumerate(draft[: rows[1]]):
        if text:
            known.setdefault(text, i)
    to_draft, to_target = np.full(rows[0], NONE, np.int32), np.full(rows[1], NONE, np.int32)
    texts = 0
    for i, text in enumerate(target[: rows[0]]):
        texts += bool(text)
        if (there := known.get(text) if text else None) is not None:
            to_draft[i] = there
            if to_target[there] < 0:
                to_target[there] = i
    return Vocabulary(to_draft, to_target, same=False), float((to_draft >= 0).sum()) / max(1, texts)
