"""Responses that later requests may name, for a limited time and within limited memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from toolkit.serve.http.limits import Limits
from toolkit.serve.http.records import Records
from toolkit.serve.http.sharing.shares import Shares

FOLDER = "responses"


@dataclass(frozen=True)
class Kept:
    """``messages``: the whole conversation, the answer included; ``items``: the same without the answer, as OpenAI's
    API lists it; ``size``: bytes of the conversation, or a few more; ``owner``: who alone may name it."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]]
    size: int
    owner: str
    until: float


@dataclass(frozen=True)
class Saved:
    """``Kept`` as it outlives the server; ``expires_at``: seconds since 1970."""

    id: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]]
    size: int
    owner: str
    expires_at: float


class Store:
    """Where too much is kept, whoever has most loses their oldest. ``records``: where it outlives the server. Raises
    ToolkitError for records that cannot be read."""

    def __init__(self, limits: Limits, records: Records | None = None) -> None:
        self._limits = limits
        self._records = records if records is not None and records.lasting else None
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0
        self._sizes, self._counts = Shares(), Shares()
        if self._records is not None:
            now = time.monotonic() - time.time()
            for s in sorted(self._records.records(FOLDER, Saved), key=lambda saved: saved.expires_at):
                until = now + s.expires_at
                self._take(s.id, Kept(s.response, s.messages, s.items, s.size, s.owner, until))
            self.get("")  # what is over goes

    def put(
        self,
        response: dict[str, Any],
        messages: list[dict[str, Any]],
        items: list[dict[str, Any]],
        size: int,
        owner: str = "",
    ) -> None:
        """Keep ``response`` under its id. ``messages`` and ``items`` may share their parts with one another, and with
        the conversation that it continues."""
        seconds, id = self._limits.stored_response_seconds, response["id"]
        if self._records is not None:
            saved = Saved(id, response, messages, items, size, owner, time.time() + seconds)
            self._records.save_later(FOLDER, saved)
        self._take(id, Kept(response, messages, items, size, owner, time.monotonic() + seconds))

    def _take(self, id: str, kept: Kept) -> None:
        self._kept[id] = kept
        self._count(kept.owner, 1, kept.size)
        while self._size > self._limits.max_stored_bytes:
            self._make_room(self._sizes)
        while len(self._kept) > self._limits.max_stored_responses:
            self._make_room(self._counts)

    def get(self, id: str, owner: str = "") -> Kept | None:
        """None for one that is unknown, no longer kept, or another's."""
        while self._kept and next(iter(self._kept.values())).until < time.monotonic():
            self._drop(next(iter(self._kept)))
        found = self._kept.get(id)
        return found if found is not None and found.owner == owner else None

    def drop(self, id: str, owner: str = "") -> bool:
        """Whether it was there."""
        found = self.get(id, owner) is not None
        if found:
            self._drop(id)
        return found

    def _make_room(self, shares: Shares) -> None:
        oldest = shares.greediest((kept.owner, id) for id, kept in self._kept.items())
        assert oldest is not None
        self._drop(oldest)

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id)
        if self._records is not None:
            self._records.forget_later(FOLDER, id)
        self._count(kept.owner, -1, -kept.size)

    def _count(self, owner: str, number: int, size: int) -> None:
        self._size += size
        self._counts.add(owner, number)
        self._sizes.add(owner, size)
