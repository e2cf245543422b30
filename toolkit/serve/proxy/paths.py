"""Which requests go through to a server behind a proxy or a fleet."""

from __future__ import annotations

import httpx2 as httpx
from starlette.exceptions import HTTPException
from starlette.types import Scope

from toolkit.serve.http.errors import ApiError

# What goes through besides /v1/…; not what ends, changes or shows a server itself.
FORWARDED = frozenset(
    "/generate /get_ppl /tokenize /detokenize /tokenizer_info /rerank /v2/rerank /score /classify /pooling "
    "/api/chat /api/generate /api/embed /api/embeddings /api/show /completion /infill /apply-template".split()
)

KEPT = ("/v1/files", "/v1/batches")  # by one server, for the key that asked it
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # of one server, too: the others would not have them


MOST_TARGET = 1 << 15  # bytes: what is sent has headers and an address besides, and a server takes 64 KiB of a head


def forwarded(scope: Scope) -> str:
    """The target (path and query) of a request that may go through. Raises HTTPException or ApiError 404 for others,
    ApiError 414 for one that is too long.

    The path is looked at decoded, and what is sent is that path: a server must not read another one out of it.
    """
    if scope["path"].startswith(KEPT):
        text = "files and batches are kept by a server of one model; ask that server itself"
        raise ApiError(404, text, code="route_not_found")
    if scope["path"].startswith(ADAPTERS):
        text = "each server has adapters of its own; ask it itself, or put them into its --adapter-dir"
        raise ApiError(404, text, code="route_not_found")
    path, query = scope["path"], scope["query_string"].decode("latin-1")
    if len(path.encode()) + len(query) > MOST_TARGET:
        told = f"the target: expected at most {MOST_TARGET:,} bytes, found more; what is long goes into the body"
        raise ApiError(414, told, code="target_too_long")
    plain = path.isprintable() and not any(sign in path for sign in "?#\\%")
    if not plain or not {".", ".."}.isdisjoint(path.split("/")) or httpx.URL(f"http://node{path}").path != path:
        raise HTTPException(404)
    if not path.startswith("/v1/") and path not in FORWARDED:
        raise HTTPException(404)
    return f"{path}?{query}" if query else path
