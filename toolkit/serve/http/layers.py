"""What is around the routes of every application here: errors in their envelopes, keys, limits, names of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response as HttpResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.errors import ToolkitError
from toolkit.serve.http.access.auth import ApiKeyMiddleware
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.access.proxies import Proxies
from toolkit.serve.http.access.users import Users
from toolkit.serve.http.errors import ApiError, from_exception
from toolkit.serve.http.intake import Intake
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.replies import json_response
from toolkit.serve.http.request_ids import RequestIds
from toolkit.serve.http.sharing.lanes import Lanes

logger = logging.getLogger("toolkit.serve")


class PlainPaths:
    """A slash at the end of a path is left out. A redirect would lead clients behind TLS to this server's own http."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"][:-1] or "/"}
        await self._app(scope, receive, send)


def add_layers(
    app: FastAPI,
    limits: Limits,
    lanes: Lanes,
    keys: ApiKeys,
    origins: list[str],
    *,
    under: Mapping[str, ApiKeys] | None = None,
    trusted: Proxies | None = None,
    digest: Callable[[bytes], str] | None = None,
    cors: type[CORSMiddleware] = CORSMiddleware,
) -> None:
    """``keys``, ``under``: as ApiKeyMiddleware has them; ``origins``: pages that may read the answers;
    ``trusted``: proxies whose word is taken for whose a request is; ``digest``: as ``Users`` has it."""
    app.add_exception_handler(Exception, _error_reply)
    for kind in (ApiError, ToolkitError):  # the one above logs a traceback, which is for mistakes of ours
        app.add_exception_handler(kind, _error_reply)
    app.add_exception_handler(HTTPException, _http_error_reply)  # type: ignore[arg-type]
    app.add_middleware(Users, keys=keys, trusted=trusted or Proxies(()), digest=digest)
    if keys or under:
        app.add_middleware(ApiKeyMiddleware, keys=keys, under=under)
    app.add_middleware(Intake, limits=limits, lanes=lanes, shared=lambda: len(keys) > 1 or bool(trusted))
    if origins:
        app.add_middleware(cors, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(PlainPaths)
    app.add_middleware(RequestIds)


async def _error_reply(request: Request, error: Exception) -> HttpResponse:
    """Whatever a route raises, in the envelope."""
    told = from_exception(error)
    if isinstance(error, ToolkitError) and told.status == 500:
        logger.error("%s", told.message)
    return json_response(told.envelope_at(request.url.path), told.status, headers=told.headers)


async def _http_error_reply(request: Request, error: HTTPException) -> HttpResponse:
    """Unknown routes and methods, in the envelope."""
    message = str(error.detail)
    allowed = (error.headers or {}).get("Allow", "")
    if error.status_code == 405 and allowed:
        message = f"{request.url.path:.200}: expected {allowed.replace(', ', ' or ')}, found {request.method}"
    elif error.status_code in (404, 405):
        message = f"{request.method} {request.url.path:.200}: no such route; the API lives under /v1"
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
    told = ApiError(error.status_code, message, code=code)
    return json_response(told.envelope_at(request.url.path), told.status, headers=error.headers)
