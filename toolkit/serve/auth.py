"""API keys: a middleware that asks for ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's do."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.serve.errors import ApiError
from toolkit.serve.page.routes import FILES
from toolkit.serve.replies import send_json

# Liveness, the page and the documentation carry no user's data.
OPEN_PATHS = frozenset({"/health", "/", "/docs", "/openapi.json", *FILES})


class ApiKeyMiddleware:
    """401 for every request without one of ``keys`` (none: all may), except to OPEN_PATHS. ``under``: what paths that
    begin so need instead."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], under: Mapping[str, Sequence[str]] | None = None) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.under = {prefix: [key.encode() for key in own] for prefix, own in (under or {}).items()}

    def _keys_for(self, path: str) -> list[bytes]:
        return next((keys for prefix, keys in self.under.items() if path.startswith(prefix)), self.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            keys = self._keys_for(scope["path"])
            if keys and not _known(headers, keys):
                given = headers.get("authorization") or headers.get("x-api-key")
                found = "an unknown API key" if given else "no API key"
                error = ApiError(
                    401, f"Expected the header 'Authorization: Bearer KEY', found {found}", code="invalid_api_key"
                )
                await send_json(send, 401, error.envelope_at(scope["path"]), [(b"www-authenticate", b"Bearer")])
                return
        await self.app(scope, receive, send)


def _known(headers: Headers, keys: Sequence[bytes]) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    tokens = [given.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
    # Every key is compared, each in constant time, so that timing tells nothing about any of them.
    matches = [hmac.compare_digest(token.encode("latin-1", "replace"), key) for token in tokens for key in keys]
    return any(matches)
