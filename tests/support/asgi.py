"""One request straight into an ASGI application, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

PATIENCE = 60.0  # seconds for an answer


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and body of the answer. Raises TimeoutError where none comes."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]}
    scope |= {"http_version": "1.1", "scheme": "http", "root_path": ""}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await asyncio.wait_for(app(scope, receive, send), PATIENCE)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
