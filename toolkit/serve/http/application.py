"""An application as all servers here begin it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from toolkit import __version__
from toolkit.serve.http.openapi.docs_page import add_docs
from toolkit.serve.page.routes import add_page


def begin_app(title: str, description: str = "", *, page: bool, docs: bool, **more: Any) -> FastAPI:
    """With the web UI, if it is to have a ``page``, and our documentation in place of FastAPI's, if it has ``docs``.
    ``more``: as ``FastAPI`` takes it."""
    app = FastAPI(
        title=title,
        version=__version__,
        description=description,
        docs_url=None,
        openapi_url="/openapi.json" if docs else None,
        redoc_url=None,
        redirect_slashes=False,
        **more,
    )
    if page:
        add_page(app)
    if docs:
        add_docs(app, page=page)
    return app
