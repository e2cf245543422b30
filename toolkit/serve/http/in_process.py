"""Requests that a process makes of its own application, without a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def scope_of(
    method: str, target: str, headers: Sequence[tuple[bytes, bytes]], client: tuple[str, int] | None
) -> dict[str, Any]:
    """What an ASGI application is called with. ``target``: path and query; ``headers``: names in lower case."""
    path, _, query = target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": list(headers),
        "client": client,
        "server": None,
    }
