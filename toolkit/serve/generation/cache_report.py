"""Where a prompt stopped coming from the prefix cache, and why: for clients that ask (``cache_report``)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.serve.http.sharing.shares import Shares

MOST = 32  # prompts that are remembered
SHOWN = 16  # tokens that are shown of where it began


class Prompts:
    """The last prompts of a server, each its owner's: nobody is told how another's began. Called from any thread."""

    def __init__(self) -> None:
        self._last: list[tuple[str, str, NDArray[np.int32]]] = []  # owner, salt, token ids
        self._shares = Shares()
        self._lock = threading.Lock()

    def seen(self, owner: str, token_ids: Sequence[int], *, compare: bool, salt: str = "") -> int:
        """How many tokens this prompt begins with as another of ``owner`` with the same ``salt`` did before, where that
        is asked; from now on it is one of those."""
        ids = np.asarray(token_ids, np.int32)
        with self._lock:
            own = [other for *whose, other in self._last if whose == [owner, salt]] if compare else []
            self._last.append((owner, salt, ids))
            self._shares.add(owner, 1)
            if len(self._last) > MOST:
                self._forget()
        return max((_common(ids, other) for other in own), default=0)

    def _forget(self) -> None:
        """The oldest prompt of the owner who has most."""
        oldest = self._shares.greediest((name, i) for i, (name, *_) in enumerate(self._last))
        assert oldest is not None
        self._shares.add(self._last.pop(oldest)[0], -1)


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    size = min(a.size, b.size)
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size


def first_miss(tokenizer: Tokenizer, token_ids: Sequence[int], cached: int, seen: int, block: int) -> dict[str, Any]:
    """Of a prompt of which ``cached`` tokens came from the cache and ``seen`` were in a prompt before: the token at
    which the cache ended, and its reason. "end": it has all but a block of ``block`` tokens or less, and they were in a
    prompt before; "new": no prompt of its owner went on so, from the text that is told; "evicted": one did, but the
    cache has it no longer."""
    if len(token_ids) - cached <= block and seen == len(token_ids):
        return {"token": cached, "reason": "end"}
    if seen - cached > block:
        return {"token": cached, "reason": "evicted"}
    start = max(cached, seen)
    return {"token": start, "reason": "new", "text": tokenizer.decode(list(token_ids[start : start + SHOWN]), False)}
