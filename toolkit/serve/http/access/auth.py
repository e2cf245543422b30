"""API keys: a middleware that asks for ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's do."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.openapi.docs_page import PATHS
from toolkit.serve.http.replies import send_json
from toolkit.serve.page.routes import FILES

KEY = "toolkit.key"  # in a request's scope: the key that it carries, b"" where none is asked for
# Liveness, the page and the documentation carry no user's data.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/", "/docs", "/openapi.json", *PATHS, *FILES})


class ApiKeyMiddleware:
    """401 for every request without one of ``keys`` (none: all may), except those that read OPEN_PATHS, and those that
    this process itself makes, which have a KEY already. ``under``: what paths that begin so need instead."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, under: Mapping[str, ApiKeys] | None = None) -> None:
        self.app = app
        self.keys = keys
        self.under = under or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope) and KEY not in scope:
            headers = Headers(scope=scope)
            keys = next((k for prefix, k in self.under.items() if scope["path"].startswith(prefix)), self.keys)
            key = keys.matching(sent_keys(headers)) if keys else b""
            if key is None:
                given = headers.get("authorization") or headers.get("x-api-key")
                found = "an unknown API key" if given else "no API key"
                error = ApiError(
                    401, f"Expected the header 'Authorization: Bearer KEY', found {found}", code="invalid_api_key"
                )
                await send_json(send, 401, error.envelope_at(scope["path"]), [(b"www-authenticate", b"Bearer")])
                return
            scope = {**scope, KEY: key}
        await self.app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" or (scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"))


def sent_keys(headers: Headers) -> list[str]:
    """What a request says its key is, by either header; "" for one that it lacks."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return [given.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
