"""Which requests go through to a server behind a proxy or a fleet."""

from __future__ import annotations

import httpx2 as httpx
from starlette.exceptions import HTTPException
from starlette.types import Scope

# What goes through besides /v1/…; not what ends, changes or shows a server itself.
FORWARDED = frozenset(
    "/generate /get_ppl /tokenize /detokenize /tokenizer_info /rerank /v2/rerank /score "
    "/api/chat /api/generate /api/embed /api/embeddings /api/show /completion /infill /apply-template".split()
)


def forwarded(scope: Scope) -> str:
    """The target (path and query) of a request that may go through. Raises HTTPException 404 for any other.

    The path is looked at decoded, and what is sent is that path: a server must not read another one out of it.
    """
    path, query = scope["path"], scope["query_string"].decode("latin-1")
    plain = path.isprintable() and not any(sign in path for sign in "?#\\%")
    if not plain or not {".", ".."}.isdisjoint(path.split("/")) or httpx.URL(f"http://node{path}").path != path:
        raise HTTPException(404)
    if not path.startswith("/v1/") and path not in FORWARDED:
        raise HTTPException(404)
    return f"{path}?{query}" if query else path
