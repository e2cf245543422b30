"""A name for each HTTP request: ``x-request-id`` as its client or a proxy has sent it, else a new one. It is in the
answer's headers, in the log's lines, and in traces."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.base.lazy_dataclass import dataclass

HEADER = "x-request-id"
_FIT = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # what may stand in a log and a header


@dataclass(frozen=True)
class Named:
    """``traceparent``: the span that the request is a part of, as the W3C's header spells it."""

    id: str
    traceparent: str | None = None


_current: ContextVar[Named | None] = ContextVar("toolkit_request", default=None)


def current() -> Named | None:
    """The request that this task works for, None where it works for none."""
    return _current.get()


class RequestIds:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        named = Named(given if _FIT.fullmatch(given) else uuid.uuid4().hex, headers.get("traceparent"))
        _current.set(named)  # of this request's task, which ends with it

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message.get("headers", ()) if pair[0].lower() != HEADER.encode()]
                message["headers"] = [*own, (HEADER.encode(), named.id.encode())]
            await send(message)

        await self._app(scope, receive, answer)
