"""Who asks: made once a request, and told on by a proxy in one header.

A request is its API key's, else its connection's. What a proxy says stands behind the key that it came with: nobody is
told from others by a header alone, for another key makes another owner, whatever stands there.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, field, fields
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.serve.http.access.auth import KEY, sent_keys
from toolkit.serve.http.access.keys import ApiKeys, KeyRules
from toolkit.serve.http.access.proxies import Proxies

HEADER = "x-toolkit-user"  # in which a proxy says whose request it passes on
_PATH = re.compile(r"[0-9a-f]{8,64}(\.[0-9a-f]{8,64}){0,3}")


@dataclass(frozen=True)
class User:
    """``id``: a digest of the key, or the connection: whose turn it is. ``name``: how metrics and the log call it, ""
    for those without a key. ``owner``: whose is what is kept for the request: a digest of the key ("" where none is
    asked for), and behind a slash whom a proxy with that key asks for. ``told``: the latter alone.
    """

    id: str
    name: str = ""
    rules: KeyRules = field(default_factory=KeyRules)
    owner: str = ""
    told: str = ""


_current: ContextVar[User | None] = ContextVar("toolkit_user", default=None)
work_of: ContextVar[str | None] = ContextVar("toolkit_owner", default=None)  # whose batch this task works for


def current_user() -> User:
    """Whose request this task works for."""
    return _current.get() or User("")


class Users:
    """An ASGI layer inside that of the keys: whose a request is. What a header says of turns, names and limits is taken
    from ``trusted`` addresses alone. ``digest``: what stands for an API key in what is kept; None: nothing is."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, trusted: Proxies, digest: Callable[[bytes], str] | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._trusted = trusted
        self._secret = os.urandom(16)
        self._digest = digest or self._short

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(self._user(scope))
        await self._app(scope, receive, send)

    def _user(self, scope: Scope) -> User:
        key, said = scope.get(KEY, b""), _read(Headers(scope=scope).get(HEADER, ""))
        own, told = self._digest(key) if key else "", said.told
        owner = work_of.get()
        if owner is None:
            owner = f"{own}/{told}" if told else own
        host, port = scope.get("client") or ("", 0)
        if said.id and host in self._trusted:
            return User(said.id, said.name, said.rules, owner, told)
        if key:
            digest, rules = self._short(key), self._keys.rules(key)
            return User(digest, rules.name or f"key-{digest[:8]}", rules, owner, told)
        return User(f"{host}:{port}" if host else "", owner=owner, told=told)  # lines of batches have no client

    def _short(self, key: bytes) -> str:
        return hashlib.blake2b(key, digest_size=8, key=self._secret).hexdigest()


def sent_digest(headers: Headers) -> str:
    """What stands for the keys that a request has sent, whether or not they are asked for."""
    return hashlib.sha256(_sent(headers)).hexdigest()


def asks_for(scope: Scope, user: User, node_key: str | None) -> str:
    """As whom a node is to keep what belongs to the request of ``user``: nobody can make it without the client's key
    and ``node_key``. What another proxy before this one has said stays behind it, and alone where the client needs no
    key and the node sees itself what was sent; "": there is nothing to say."""
    if not (node_key or scope.get(KEY)):
        return user.told
    sent = scope.get(KEY, b"") or _sent(Headers(scope=scope))
    own = hmac.new((node_key or "").encode(), sent, "sha256").hexdigest()[:32]
    return f"{own}.{user.told}" if user.told else own


def header_of(user: User, owner: str, trusted: bool) -> tuple[bytes, bytes]:
    """What a proxy tells a node of whose request it is. ``owner``: as ``asks_for`` says; ``trusted``: whether the node
    is the operator's, which alone learns more."""
    more = {"id": user.id, "name": user.name, **_set(user.rules)} if trusted else {}
    return HEADER.encode(), orjson.dumps(more | ({"owner": owner} if owner else {}))


def _sent(headers: Headers) -> bytes:
    return "\n".join(sent_keys(headers)).encode("latin-1", "replace")


def _set(rules: KeyRules) -> dict[str, Any]:
    return {name: value for name, value in asdict(rules).items() if name != "name" and value is not None}


def _read(header: str) -> User:
    """Inverse of ``header_of``; with nothing in it for what is none."""
    try:
        data = orjson.loads(header) if header else {}
        told = str(data.get("owner", ""))
        if told and not _PATH.fullmatch(told):
            told = hashlib.sha256(told.encode("utf-8", "replace")).hexdigest()
    except (ValueError, AttributeError):
        return User("")
    try:
        known = {f.name for f in fields(KeyRules)} - {"name"}
        rules: dict[str, Any] = {name: float(data[name]) for name in known if name in data}
        whole = {name: int(value) for name, value in rules.items() if name in KeyRules.WHOLE}
        checked = KeyRules(**(rules | whole)).checked(HEADER)
        return User(str(data["id"])[:128], str(data.get("name", ""))[:64], checked, told=told)
    except (ValueError, TypeError, KeyError, OverflowError, UsageError):
        return User("", told=told)
