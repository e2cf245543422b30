"""A request to the application of this process, as its own clients' requests go, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp

from toolkit.base.lazy_dataclass import dataclass
from toolkit.serve.http.access.auth import KEY
from toolkit.serve.http.in_process import scope_of
from toolkit.serve.http.request_ids import HEADER

logger = logging.getLogger("toolkit.serve")


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    request_id: str


async def ask(app: ASGIApp, path: str, body: bytes) -> Answer:
    """POST ``body``, JSON, to ``path``; no key is asked for. Cancelling it ends the request."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    status, request_id, parts = 500, "", []

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # this client never goes away
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(HEADER.encode(), b"").decode()
        else:
            parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    try:
        await app({**scope_of("POST", path, headers, None), KEY: b""}, receive, send)
    except Exception as error:  # told in the answer; a server would log it, too
        if not parts:
            raise
        logger.error("a line of a batch failed", exc_info=error)
    return Answer(status, b"".join(parts), request_id)
