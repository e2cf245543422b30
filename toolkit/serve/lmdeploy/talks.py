"""Conversations that the server keeps for its clients, by ``session_id``."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits

LOOK_S = 1.0  # between looks while the oldest conversation is being answered
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


class Talks:
    """At most ``max_sessions`` of them; the one used longest ago goes first, and each after ``session_timeout`` seconds
    without a turn. ``forget`` is called with the name of each that goes."""

    def __init__(self, limits: Limits, forget: Callable[[str], None]) -> None:
        self._limits = limits
        self._forget = forget
        self._talks: OrderedDict[Key, Talk] = OrderedDict()  # the one used last at the end
        self._made = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(self, key: Key) -> Talk:
        """The conversation ``key``, new where there is none; it is the caller's until ``close``.

        Raises ApiError 409 where another request has it, 503 where all that may be kept are in use.
        """
        self._drop_old()
        talk = self._talks.get(key)
        if talk is None:
            self._make_room()
            self._made += 1
            talk = self._talks[key] = Talk(f"interactive-{self._made}")
        if talk.busy:
            raise ApiError(409, f"session_id: {key[1]} is being answered; wait, or cancel it", param="session_id")
        talk.busy = True
        self._talks.move_to_end(key)
        return talk

    def find(self, key: Key) -> Talk | None:
        """The conversation ``key``, None where there is none."""
        return self._talks.get(key)

    def close(self, key: Key, *, keep: bool) -> None:
        """The turn has ended; ``keep``: the conversation goes on."""
        talk = self._talks[key]
        talk.busy, talk.used = False, time.monotonic()
        if not keep:
            self._end(key)
        elif self._timer is None:
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
                self._end(key)

    def _make_room(self) -> None:
        if len(self._talks) < self._limits.max_sessions:
            return
        idle = next((key for key, talk in self._talks.items() if not talk.busy), None)
        if idle is None:
            raise ApiError(503, f"all {len(self._talks)} sessions are being answered (the server's --max-sessions)")
        self._end(idle)

    def _end(self, key: Key) -> None:
        self._forget(self._talks.pop(key).name)
