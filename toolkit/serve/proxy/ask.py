"""What a node is asked by the proxy itself, and what of its answers is believed: a node may be anybody's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
from pydantic_core import from_json

from toolkit.serve.model_cards import MOST_NAME, good_name

MOST_BYTES = 1 << 20  # of an answer
PATIENCE_S = 5.0  # for the whole of it
MEETING_S = 10.0
MOST_MODELS = 4096  # of one node
MOST_PROXIES = 64  # that a node may say it leads to
_ID = re.compile(r"[0-9a-f]{32}")


class OddAnswer(ValueError):
    """An answer that is none to rely on."""


async def ask(http: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OddAnswer for what is too long, too slow or packed, httpx.HTTPError."""
    return await _asked(http, "GET", url, headers, PATIENCE_S)


async def posted(http: httpx.AsyncClient, url: str, headers: Mapping[str, str], body: Any) -> tuple[int, bytes]:
    """The same of a POST of JSON, which may take as long as two nodes need to meet."""
    return await _asked(http, "POST", url, headers, MEETING_S, json=body)


async def _asked(
    http: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], patience: float, **more: Any
) -> tuple[int, bytes]:
    path = httpx.URL(url).path
    sent = {**headers, "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(patience),
            http.stream(method, url, headers=sent, timeout=patience, **more) as reply,
        ):
            check(reply)
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise OddAnswer(f"{path}: packed though asked for plain")
            body = bytearray()
            async for piece in reply.aiter_raw():
                body += piece
                if len(body) > MOST_BYTES:
                    raise OddAnswer(f"{path}: more than {MOST_BYTES:,} bytes")
            return reply.status_code, bytes(body)
    except TimeoutError:
        raise OddAnswer(f"{path}: no whole answer within {patience:g} s") from None


def check(reply: httpx.Response) -> None:
    """Raise OddAnswer for a head that cannot be passed on as it is."""
    if not 200 <= reply.status_code < 600:
        raise OddAnswer(f"status {reply.status_code}")
    if "content-length" in reply.headers and "transfer-encoding" in reply.headers:
        raise OddAnswer("an answer with Content-Length beside Transfer-Encoding")


def plain(text: str) -> str:
    """What a node has had a part in, as it may stand in a line."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:MOST_NAME])


def model_names(body: bytes) -> list[str] | None:
    """The good names in an answer of /v1/models, each once; None where it is no such answer."""
    try:
        found = [card["id"] for card in from_json(body)["data"][:MOST_MODELS]]
    except (ValueError, LookupError, TypeError):
        return None
    return list(dict.fromkeys(filter(good_name, found)))


def proxies(body: bytes) -> list[str]:
    """By their ids the proxies that an answer of /health names: the one that answers, and those that it leads to."""
    try:
        found = from_json(body)["proxies"][:MOST_PROXIES]
    except (ValueError, LookupError, TypeError):
        return []
    return [name for name in found if isinstance(name, str) and _ID.fullmatch(name)]
