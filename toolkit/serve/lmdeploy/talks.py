"""Conversations that the server keeps for its clients, by ``session_id``."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.records import Records
from toolkit.serve.http.sharing.shares import Shares

FOLDER = "sessions"
LOOK_S = 1.0  # between looks while the oldest conversation is being answered
NOTES = 16  # so many times max_sessions it is remembered of a conversation that it was forgotten
Key = tuple[str, int]  # who, and which of theirs


@dataclass
class Talk:
    """``tokens``: what the turns so far take in the cache. ``name``: of the engine's session, which keeps them there.
    ``request_id``: of its last turn, "" before the engine has it; ``waiting``: the turn's task until then."""

    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    used: float = 0.0
    busy: bool = False
    request_id: str = ""
    waiting: asyncio.Task[Any] | None = None
    saved: str = ""  # id of its record

    @contextmanager
    def until_started(self) -> Iterator[None]:
        """Work that ``cancel`` may end, as long as the engine has nothing of it. Raises ApiError 499 then."""
        self.request_id, self.waiting = "", asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError as error:
            if self.waiting is not None:  # its client went away
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            text = "The request was aborted: its session was cancelled"
            raise ApiError(499, text, code="request_cancelled") from error
        finally:
            self.waiting = None

    def cancel(self) -> None:
        """End a turn that the engine does not have yet."""
        if self.waiting is not None:
            task, self.waiting = self.waiting, None
            task.cancel()


@dataclass(frozen=True)
class Saved:
    """A conversation as it outlives the server; ``used``: seconds since 1970."""

    id: str
    owner: str
    session_id: int
    messages: list[dict[str, Any]]
    tokens: int
    used: float


class Talks:
    """At most ``max_sessions`` of them: whoever has most loses the one that they used longest ago; and each goes after
    ``session_timeout`` seconds without a turn. Its client is told. ``forget`` is called with the name of each that
    goes."""

    def __init__(self, limits: Limits, forget: Callable[[str], None]) -> None:
        self._limits = limits
        self._forget = forget
        self._talks: OrderedDict[Key, Talk] = OrderedDict()  # the one used last at the end
        self._shares = Shares()  # of owners in them
        self._notes: OrderedDict[Key, str] = OrderedDict()  # why a conversation was forgotten
        self._noted = Shares()
        self._made = 0
        self._timer: asyncio.TimerHandle | None = None
        self._records: Records | None = None

    def open(self, key: Key, *, goes_on: bool = False) -> Talk:
        """The conversation ``key``, new where there is none; it is the caller's until ``close``. ``goes_on``: the
        caller counts on what was said.

        Raises ApiError 409 where another request has it, 410 (once) where it was forgotten and ``goes_on``, 503 where
        all that may be kept are in use.
        """
        self._drop_old()
        talk = self._talks.get(key)
        if talk is None:
            why = self._drop_note(key)
            if why is not None and goes_on:
                text = f"session_id: the conversation {key[1]} was forgotten ({why}); the next turn begins a new one"
                raise ApiError(410, text, param="session_id", code="session_forgotten")
            self._make_room(key[0])
            self._made += 1
            talk = self._talks[key] = Talk(f"interactive-{self._made}")
            self._shares.add(key[0], 1)
        if talk.busy:
            raise ApiError(409, f"session_id: {key[1]} is being answered; wait, or cancel it", param="session_id")
        talk.busy = True
        self._talks.move_to_end(key)
        return talk

    def restore(self, records: Records) -> None:
        """Go on with the conversations of ``records``, and keep them there from now on."""
        if not records.lasting:
            return
        self._records = records
        now = time.monotonic() - time.time()
        for s in sorted(records.records(FOLDER, Saved), key=lambda saved: saved.used)[-self._limits.max_sessions :]:
            self._made += 1
            talk = Talk(f"interactive-{self._made}", s.messages, s.tokens, now + s.used, saved=s.id)
            self._talks[s.owner, s.session_id] = talk
            self._shares.add(s.owner, 1)
        self._drop_old()

    def _save(self, key: Key, talk: Talk) -> None:
        if self._records is not None:
            talk.saved = f"talk_{hashlib.blake2b(f'{key[1]} {key[0]}'.encode(), digest_size=16).hexdigest()}"
            saved = Saved(talk.saved, *key, list(talk.messages), talk.tokens, time.time())
            self._records.save_later(FOLDER, saved)

    def find(self, key: Key) -> Talk | None:
        """The conversation ``key``, None where there is none."""
        return self._talks.get(key)

    def close(self, key: Key, *, keep: bool) -> None:
        """The turn has ended; ``keep``: the conversation goes on."""
        talk = self._talks[key]
        talk.busy, talk.used = False, time.monotonic()
        if not keep:
            self._end(key)
            return
        self._save(key, talk)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.session_timeout, self._look)

    def _look(self) -> None:
        """Drop what is old, whether or not another turn comes: it holds blocks of the KV cache."""
        self._timer = None
        self._drop_old()
        if self._talks:
            oldest = min(talk.used for talk in self._talks.values())
            left = oldest + self._limits.session_timeout - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(left, LOOK_S), self._look)

    def _drop_old(self) -> None:
        oldest_allowed = time.monotonic() - self._limits.session_timeout
        for key, talk in list(self._talks.items()):
            if not talk.busy and talk.used < oldest_allowed:
                self._end(key, f"unused for {self._limits.session_timeout:g} s, the server's --session-timeout")

    def _make_room(self, owner: str) -> None:
        """For one more of ``owner``, who takes no place of somebody with less."""
        limit = self._limits.max_sessions
        if len(self._talks) < limit:
            return
        self._shares.add(owner, 1)
        least = self._shares.rank(owner)
        idle = [key for key, talk in self._talks.items() if not talk.busy and self._shares.rank(key[0]) >= least]
        oldest = self._shares.greediest((key[0], key) for key in idle)
        self._shares.add(owner, -1)
        if oldest is None:
            text = f"all {limit} sessions (the server's --max-sessions) are being answered, or kept for others"
            raise ApiError(503, text)
        self._end(oldest, f"to make room for others: more than {limit}, the server's --max-sessions")

    def _end(self, key: Key, why: str = "") -> None:
        """Forget a conversation; ``why``: what its client is told, "" for one that has ended it."""
        self._shares.add(key[0], -1)
        talk = self._talks.pop(key)
        self._forget(talk.name)
        if self._records is not None and talk.saved:
            self._records.forget_later(FOLDER, talk.saved)
        if not why:
            return
        self._notes[key] = why
        self._noted.add(key[0], 1)
        while len(self._notes) > NOTES * self._limits.max_sessions:
            oldest = self._noted.greediest((noted[0], noted) for noted in self._notes)
            assert oldest is not None
            self._drop_note(oldest)

    def _drop_note(self, key: Key) -> str | None:
        why = self._notes.pop(key, None)
        if why is not None:
            self._noted.add(key[0], -1)
        return why
