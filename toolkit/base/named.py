"""A mapping whose names are known, and whose values are made when they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class Named(Mapping[str, T]):
    """Says which ``names`` there are; a class that derives from it, what each one is (``__getitem__``)."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
