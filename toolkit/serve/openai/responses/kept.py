"""Responses that later requests may name, for a limited time and within limited memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from toolkit.serve.http.limits import Limits


@dataclass(frozen=True)
class Kept:
    """``messages``: the whole conversation, the answer included; ``items``: the same without the answer, as OpenAI's
    API lists it; ``size``: bytes of the conversation, or a few more."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]]
    size: int
    until: float


class Store:
    """The oldest go first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def put(
        self, response: dict[str, Any], messages: list[dict[str, Any]], items: list[dict[str, Any]], size: int
    ) -> None:
        """Keep ``response`` under its id. ``messages`` and ``items`` may share their parts with one another, and with
        the conversation that it continues."""
        until = time.monotonic() + self._limits.stored_response_seconds
        self._kept[response["id"]] = Kept(response, messages, items, size, until)
        self._size += size
        while self._kept and (
            len(self._kept) > self._limits.max_stored_responses or self._size > self._limits.max_stored_bytes
        ):
            self.drop(next(iter(self._kept)))

    def get(self, id: str) -> Kept | None:
        """None for one that is unknown, or no longer kept."""
        while self._kept and next(iter(self._kept.values())).until < time.monotonic():
            self.drop(next(iter(self._kept)))
        return self._kept.get(id)

    def drop(self, id: str) -> bool:
        """Whether it was there."""
        kept = self._kept.pop(id, None)
        self._size -= kept.size if kept else 0
        return kept is not None
