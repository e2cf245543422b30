"""What a proxy says of a request whose prompt one server computes and whose answer another one writes: in one header,
for every API alike."""

from __future__ import annotations

from contextvars import ContextVar

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.base.lazy_dataclass import dataclass

HEADER = "x-toolkit-kv"
_MOST = 300  # characters


@dataclass(frozen=True)
class Handed:
    """``lend``: compute the prompt alone, and lend what it has become; ``source``: the id of the engine that has."""

    lend: bool = False
    source: str = ""

    def header(self) -> tuple[bytes, bytes]:
        return HEADER.encode(), orjson.dumps(self)


_current: ContextVar[Handed | None] = ContextVar("toolkit_handed", default=None)


def handed() -> Handed:
    """What is said of the request that this task works for."""
    return _current.get() or Handed()


class HandedOver:
    """An ASGI layer that reads the header. Who sends it gains nothing: an answer of one token, or blocks that are
    looked for, by what they hold, at an engine to which the operator's proxy has connected this one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(_read(Headers(scope=scope).get(HEADER, "")))
        await self._app(scope, receive, send)


def _read(header: str) -> Handed:
    if not header or len(header) > _MOST:
        return Handed()
    try:
        found = orjson.loads(header)
        lend, source = found.get("lend", False), found.get("source", "")
    except (ValueError, AttributeError):
        return Handed()
    return Handed(lend is True, source if isinstance(source, str) else "")
