"""Whose a request is, and so whose is what is kept for it; and who gives way where too much is kept."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Scope

from toolkit.serve.http.auth import KEY, sent_keys

T = TypeVar("T")
HEADER = "x-session-owner"  # for whom a proxy asks, whose key all its clients share
_PATH = re.compile(r"[0-9a-f]{8,64}(\.[0-9a-f]{8,64}){0,3}")
work_of: ContextVar[str | None] = ContextVar("toolkit_owner", default=None)  # whose batch this task works for


def owner(scope: Scope, digest: Callable[[bytes], str]) -> str:
    """Who asks: the API key, as ``digest`` spells it ("" where none is asked for), and behind a slash whom a proxy with
    that key asks for. So nobody is told from others by a header alone: another key makes another owner, whatever
    stands there."""
    if (found := work_of.get()) is not None:
        return found
    key, told = digest(scope.get(KEY, b"")), _told(Headers(scope=scope))
    return f"{key}/{told}" if told else key


def sent_digest(headers: Headers) -> str:
    """What stands for the keys that a request has sent, whether or not they are asked for."""
    return hashlib.sha256(_sent(headers)).hexdigest()


def passed_on(scope: Scope, node_key: str | None) -> bytes | None:
    """HEADER's value for a node, which nobody can make without the client's key and ``node_key``; None where the client
    needs no key and the node sees itself what was sent. What another proxy before this one has said stays behind it.
    """
    if not (node_key or scope.get(KEY)):
        return None
    headers = Headers(scope=scope)
    own = hmac.new((node_key or "").encode(), scope.get(KEY, b"") or _sent(headers), "sha256").hexdigest()[:32]
    told = _told(headers)
    return (f"{own}.{told}" if told else own).encode()


def _sent(headers: Headers) -> bytes:
    return "\n".join(sent_keys(headers)).encode("latin-1", "replace")


def _told(headers: Headers) -> str:
    text = headers.get(HEADER, "")
    return text if not text or _PATH.fullmatch(text) else hashlib.sha256(text.encode("latin-1", "replace")).hexdigest()


class Shares:
    """How much is kept for each owner."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()

    def add(self, owner: str, amount: int) -> None:
        """``amount`` more is kept, or less."""
        for level in _levels(owner):
            self._totals[level] += amount
            if not self._totals[level]:
                del self._totals[level]

    def rank(self, owner: str) -> tuple[int, ...]:
        """Higher, the more an owner has: all clients of a proxy together are compared with other keys, and among
        themselves."""
        return tuple(self._totals[level] for level in _levels(owner))

    def greediest(self, kept: Iterable[tuple[str, T]]) -> T | None:
        """Of pairs (owner, thing), the first thing of the owner who has most; None where there are none."""
        first: dict[str, T] = {}
        for name, thing in kept:
            first.setdefault(name, thing)
        return first[max(first, key=self.rank)] if first else None


def _levels(owner: str) -> Iterator[str]:
    """An API key, each proxy's client behind it, and what is that owner's alone."""
    parts = owner.replace(".", "/").split("/")
    for end in range(1, len(parts) + 1):
        yield "/".join(parts[:end])
    yield "/".join((*parts, ""))
