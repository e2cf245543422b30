"""The page at ``/``: files of this folder, as they are. It speaks to the server's API, as any client does."""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, and no text that becomes markup: what a model writes stays text.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _read() -> dict[str, Response]:
    """Path -> the answer that is each file."""
    found = {}
    for entry in files(__package__).iterdir():
        if (kind := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = Response(entry.read_bytes(), headers=_HEADERS, media_type=kind)
    return found


FILES = _read()


def add_page(app: FastAPI) -> None:
    """Have ``app`` show the page."""
    for path, answer in FILES.items():
        show(app, path, answer)


def show(app: FastAPI, path: str, answer: Response) -> None:
    """Have ``app`` answer so whoever opens the path."""
    app.router.routes.append(Route(path, partial(_send, answer)))


async def _send(answer: Response, request: Request) -> Response:
    return answer
