"""What a user has used: requests that run and tokens of the last minute, and the refusal of what is beyond."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.serve.http.access.users import User
from toolkit.serve.http.errors import ApiError

MINUTE = 60.0
REST = 4096  # users known of whom nothing runs, beyond which those who owe nothing are forgotten


@dataclass
class _Used:
    running: int = 0
    tokens: float = 0.0  # of those of a minute that it has used and not got back by ``since``
    since: float = 0.0


class Quotas:
    """Requests that run and tokens of the last minute, by user. ``requests``, ``tokens_per_minute``: of those whose
    rules say nothing; None = no limit. Only users with a key have limits."""

    def __init__(
        self,
        requests: int | None,
        tokens_per_minute: int | None,
        refused: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._tokens = tokens_per_minute
        self._refused = refused
        self._clock = clock
        self._used: dict[str, _Used] = {}

    def enter(self, user: User) -> None:
        """Raise ApiError (429) where a request of ``user`` is one too many; else count it until this task ends."""
        task = asyncio.current_task()
        if not user.name or task is None:
            return
        used = self._used.setdefault(user.id, _Used(since=self._clock()))
        tokens = self._limit(user)
        if tokens is not None and (beyond := self._refilled(used, tokens).tokens - tokens) >= 0:
            seconds = int(beyond * MINUTE / tokens) + 1
            limit = spelled("key_tokens_per_minute")
            text = f"this key has used its {tokens:,} tokens a minute ({limit}); try again in {seconds} s"
            raise self._refusal(user, "key_tokens_per_minute", text, seconds)
        requests = self._requests if user.rules.requests is None else user.rules.requests
        if requests is not None and used.running >= requests:
            text = f"{used.running} requests of this key are being answered (its {spelled('key_requests')}); try again"
            raise self._refusal(user, "key_requests", text)
        used.running += 1
        task.add_done_callback(lambda _: self._leave(user.id))

    def spend(self, user: User, tokens: int) -> None:
        """``user`` has used so many tokens, of prompts and answers together."""
        limit = self._limit(user)
        if user.name and limit is not None:
            used = self._used.setdefault(user.id, _Used(since=self._clock()))
            self._refilled(used, limit).tokens += tokens

    def _limit(self, user: User) -> int | None:
        return self._tokens if user.rules.tokens_per_minute is None else user.rules.tokens_per_minute

    def _refilled(self, used: _Used, limit: int) -> _Used:
        """What a user has by now: a bucket that holds the tokens of a minute and fills steadily."""
        now = self._clock()
        used.tokens = max(0.0, used.tokens - (now - used.since) * limit / MINUTE)
        used.since = now
        return used

    def _leave(self, user_id: str) -> None:
        used = self._used[user_id]
        used.running -= 1
        if len(self._used) > REST:
            self._used = {name: u for name, u in self._used.items() if u.running or u.tokens > 0}

    def _refusal(self, user: User, limit: str, text: str, seconds: int | None = None) -> ApiError:
        self._refused(user.name, limit)
        return ApiError(429, text, code=limit, retry_after=seconds)
