"""Where a prompt stopped coming from the prefix cache, and why: for clients that ask (``cache_report``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text.tokenizer import Tokenizer

MOST = 32  # prompts that are remembered
SHOWN = 16  # tokens that are shown of where it began


class Prompts:
    """The last prompts of a server."""

    def __init__(self) -> None:
        self._last: deque[NDArray[np.int32]] = deque(maxlen=MOST)

    def seen(self, token_ids: Sequence[int], *, compare: bool) -> int:
        """How many tokens this prompt begins with as another did before, where that is asked; from now on it is one of
        those."""
        ids = np.asarray(token_ids, np.int32)
        longest = max((_common(ids, other) for other in list(self._last)), default=0) if compare else 0
        self._last.append(ids)
        return longest


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    size = min(a.size, b.size)
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size


def first_miss(tokenizer: Tokenizer, token_ids: Sequence[int], cached: int, seen: int, block: int) -> dict[str, Any]:
    """Of a prompt of which ``cached`` tokens came from the cache and ``seen`` were in a prompt before: the token at
    which the cache ended, and its reason. "end": it has all but a block of ``block`` tokens or less, and they were in a
    prompt before; "new": no prompt went on so, from the text that is told; "evicted": one did, but the cache has it no
    longer."""
    if len(token_ids) - cached <= block and seen == len(token_ids):
        return {"token": cached, "reason": "end"}
    if seen - cached > block:
        return {"token": cached, "reason": "evicted"}
    start = max(cached, seen)
    return {"token": start, "reason": "new", "text": tokenizer.decode(list(token_ids[start : start + SHOWN]), False)}
