"""The documentation of the API at ``/docs``: Swagger UI (Apache 2.0), whose files the package ``fastapi-offline`` (MIT)
has, so that a browser without the internet shows it too."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response

from toolkit.serve.page.routes import show

_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
PATHS = tuple(f"/docs/{name}" for name in _FILES)
_HEADERS = {
    # FastAPI's page starts Swagger by a script that stands in it.
    "content-security-policy": "default-src 'none'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def add_docs(app: FastAPI, page: bool) -> None:
    """Have ``app`` show its documentation; at / where there is no ``page`` to chat, as LMDeploy has it. The files'
    names are relative, for servers behind a path of a proxy."""
    shown = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{app.title}: API",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    shown.headers.update(_HEADERS)
    show(app, "/docs" if page else "/", shown)
    for name, kind in _FILES.items():
        data = (files("fastapi_offline") / "static" / name).read_bytes()
        show(app, f"/docs/{name}", Response(data, headers=_HEADERS, media_type=kind))
