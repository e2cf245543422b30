"""Tensors by name that are made when they are asked for, so that a layer need not be in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
KEEP = 128 << 20  # bytes


class Lazy(Mapping[str, T]):
    """``make(name)`` for each of ``names``, anew each time that it is asked for; tensors that fit what is left of
    ``room`` bytes are kept instead (the first that are asked for, not the last: layers are read from end to end)."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T], room: int = 0) -> None:
        self._names, self._make, self.room = dict.fromkeys(names), make, room
        self._kept: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._kept:
            return self._kept[name]
        if name not in self._names:
            raise KeyError(name)
        value = self._make(name)
        if isinstance(value, Tensor) and (size := value.numel() * value.element_size()) <= self.room:
            self.room -= size
            self._kept[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
