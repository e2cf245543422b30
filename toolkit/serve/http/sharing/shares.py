"""How much is kept for whom, and who gives way where it is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Shares:
    """How much is kept for each owner."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()

    def add(self, owner: str, amount: int) -> None:
        """``amount`` more is kept, or less."""
        for level in _levels(owner):
            self._totals[level] += amount
            if not self._totals[level]:
                del self._totals[level]

    def rank(self, owner: str) -> tuple[int, ...]:
        """Higher, the more an owner has: all clients of a proxy together are compared with other keys, and among
        themselves."""
        return tuple(self._totals[level] for level in _levels(owner))

    def greediest(self, kept: Iterable[tuple[str, T]]) -> T | None:
        """Of pairs (owner, thing), the first thing of the owner who has most; None where there are none."""
        first: dict[str, T] = {}
        for name, thing in kept:
            first.setdefault(name, thing)
        return first[max(first, key=self.rank)] if first else None


def _levels(owner: str) -> Iterator[str]:
    """An API key, each proxy's client behind it, and what is that owner's alone."""
    parts = owner.replace(".", "/").split("/")
    for end in range(1, len(parts) + 1):
        yield "/".join(parts[:end])
    yield "/".join((*parts, ""))
