"""What outlives a server: records of what it keeps for its clients."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

R = TypeVar("R")


class Records(Protocol):
    """``lasting``: whether there is a place for them; without one nothing is asked of the rest."""

    lasting: bool

    def records(self, folder: str, kind: type[R]) -> list[R]:
        """All of a folder that can be read."""

    def save_later(self, folder: str, record: Any) -> None:
        """Keep a record under its ``id``, soon: nobody waits for the disk."""

    def forget_later(self, folder: str, id: str) -> None: ...
