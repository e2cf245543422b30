"""Responses that later requests may name, for a limited time and within limited memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.records import Records
from toolkit.serve.http.sharing.shares import Shares

FOLDER = "responses"


@dataclass(frozen=True)
class Kept:
    """``messages``: the whole conversation, the answer included; ``items``: the same without the answer, as OpenAI's
    API lists it; ``size``: bytes of the conversation, or a few more; ``owner``: who alone may name it; ``expires_at``:
    seconds since 1970."""

    id: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]]
    size: int
    owner: str
    expires_at: float


class Store:
    """Where too much is kept, whoever has most loses their oldest. ``records``: where it outlives the server."""

    def __init__(self, limits: Limits, records: Records | None = None) -> None:
        self._limits = limits
        self._records = records if records is not None and records.lasting else None
        self._kept: OrderedDict[str, tuple[Kept, float]] = OrderedDict()  # and until when, of time.monotonic
        self._size = 0
        self._sizes, self._counts = Shares(), Shares()
        if self._records is not None:
            now = time.monotonic() - time.time()
            latest = time.time() + limits.stored_response_seconds
            for kept in sorted(self._records.records(FOLDER, Kept), key=lambda kept: kept.expires_at):
                self._take(kept, now + min(kept.expires_at, latest))
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
        seconds = self._limits.stored_response_seconds
        kept = Kept(response["id"], response, messages, items, size, owner, time.time() + seconds)
        if self._records is not None:
            self._records.save_later(FOLDER, kept)
        self._take(kept, time.monotonic() + seconds)

    def _take(self, kept: Kept, until: float) -> None:
        self._kept[kept.id] = kept, until
        self._count(kept.owner, 1, kept.size)
        while self._size > self._limits.max_stored_bytes:
            self._make_room(self._sizes)
        while len(self._kept) > self._limits.max_stored_responses:
            self._make_room(self._counts)

    def get(self, id: str, owner: str = "") -> Kept | None:
        """None for one that is unknown, no longer kept, or another's."""
        while self._kept and next(iter(self._kept.values()))[1] < time.monotonic():
            self._drop(next(iter(self._kept)))
        found, _ = self._kept.get(id, (None, 0.0))
        return found if found is not None and found.owner == owner else None

    def drop(self, id: str, owner: str = "") -> bool:
        """Whether it was there."""
        found = self.get(id, owner) is not None
        if found:
            self._drop(id)
        return found

    def _make_room(self, shares: Shares) -> None:
        oldest = shares.greediest((kept.owner, kept.id) for kept, _ in self._kept.values())
        assert oldest is not None
        self._drop(oldest)

    def _drop(self, id: str) -> None:
        kept, _ = self._kept.pop(id)
        if self._records is not None:
            self._records.forget_later(FOLDER, id)
        self._count(kept.owner, -1, -kept.size)

    def _count(self, owner: str, number: int, size: int) -> None:
        self._size += size
        self._counts.add(owner, number)
        self._sizes.add(owner, size)
