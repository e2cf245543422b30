"""Tensors by name that are made when they are asked for, so that a layer need not be in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

from toolkit.base.named import Named

T = TypeVar("T")
KEEP = 128 << 20  # bytes


class Lazy(Named[T]):
    """``make(name)`` for each of ``names``, anew each time that it is asked for; tensors that fit what is left of
    ``room`` bytes are kept instead (the first that are asked for, not the last: layers are read from end to end)."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T], room: int = 0) -> None:
        super().__init__(dict.fromkeys(names))
        self._make, self.room = make, room
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
