"""Who asks: the API key of a request or its connection, what the operator allows to that key, and what it has used."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.configs.option import spelled
from toolkit.errors import UsageError
from toolkit.serve.http.auth import KEY
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.keys import ApiKeys, KeyRules
from toolkit.serve.http.proxies import Proxies

HEADER = "x-toolkit-user"  # by which a proxy says whose request it passes on
MINUTE = 60.0
REST = 4096  # users known of whom nothing runs, beyond which those who owe nothing are forgotten


@dataclass(frozen=True)
class User:
    """``id``: a digest of the key, or the connection. ``name``: how metrics and the log call it, "" for those without a
    key."""

    id: str
    name: str = ""
    rules: KeyRules = field(default_factory=KeyRules)


_current: ContextVar[User | None] = ContextVar("toolkit_user", default=None)


def current_user() -> User:
    """Whose request this task works for."""
    return _current.get() or User("")


class Users:
    """An ASGI layer inside that of the keys: whose a request is. A header that says so is taken from ``trusted``
    addresses alone; of all others it is left out."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, trusted: Proxies) -> None:
        self._app = app
        self._keys = keys
        self._trusted = trusted
        self._secret = os.urandom(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(self._user(scope))
        await self._app(scope, receive, send)

    def _user(self, scope: Scope) -> User:
        host, port = scope.get("client") or ("", 0)
        if host in self._trusted:
            told = next((v for k, v in scope["headers"] if k.lower() == HEADER.encode()), None)
            if told is not None and (user := _read(told)) is not None:
                return user
        if key := scope.get(KEY, b""):
            digest = hashlib.blake2b(key, digest_size=8, key=self._secret).hexdigest()
            rules = self._keys.rules(key)
            return User(digest, rules.name or f"key-{digest[:8]}", rules)
        return User(f"{host}:{port}" if host else "")  # lines of batches have no client


def header_of(user: User) -> tuple[bytes, bytes]:
    """``user`` as a proxy tells a node of it."""
    return HEADER.encode(), orjson.dumps({"id": user.id, "name": user.name, **_set(user.rules)})


def _set(rules: KeyRules) -> dict[str, Any]:
    return {name: value for name, value in asdict(rules).items() if name != "name" and value is not None}


def _read(told: bytes) -> User | None:
    """Inverse of ``header_of``; None for what is none."""
    try:
        data = orjson.loads(told)
        known = {f.name for f in fields(KeyRules)} - {"name"}
        rules: dict[str, Any] = {name: float(data[name]) for name in known if name in data}
        whole = {name: int(value) for name, value in rules.items() if name in KeyRules.WHOLE}
        return User(str(data["id"])[:128], str(data.get("name", ""))[:64], KeyRules(**(rules | whole)).checked(HEADER))
    except (ValueError, TypeError, KeyError, OverflowError, UsageError):
        return None


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
