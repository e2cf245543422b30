"""A server tells a proxy that it is there, again and again: ``--proxy-url``."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from toolkit.base import tls
from toolkit.base.lazy_dataclass import dataclass
from toolkit.serve.proxy.nodes import UNSEEN, checked

logger = logging.getLogger("toolkit.serve")
EVERY_S = 15.0
LEASE_S = 90.0  # after which a proxy forgets a server that it has heard nothing of
RETRY_S = 2.0  # after which a proxy that failed is tried again; doubles with every failure
LONGEST_S = 60.0
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Announcement:
    """``proxy_url``: where. ``key``: what the proxy asks for. ``node_url``: this server's own address as the proxy
    reaches it, None = found out."""

    proxy_url: str
    key: str | None = None
    node_url: str | None = None

    def check(self) -> None:
        """Raise UsageError for an address that is none."""
        for option, url in (("--proxy-url", self.proxy_url), ("--node-url", self.node_url)):
            if url is not None:
                checked(url, option)

    def own_address(self, url: str) -> str:
        """``url``, where this server listens, as the proxy reaches it: 0.0.0.0 is no address to connect to. Raises
        OSError where there is no way to the proxy now."""
        if self.node_url is not None:
            return checked(self.node_url)
        parts = urlsplit(url)
        if parts.hostname not in ("0.0.0.0", "::"):
            return url
        proxy = urlsplit(self.proxy_url)
        way = socket.AF_INET if parts.hostname == "0.0.0.0" else socket.AF_UNSPEC
        family, kind, _, _, there = socket.getaddrinfo(proxy.hostname, proxy.port or 80, way, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing; tells the way out
            host = probe.getsockname()[0]
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"

    async def repeat(self, models: Callable[[], Sequence[str]], url: str) -> None:
        """Tell the proxy of this server, which listens at ``url`` and serves ``models()`` then, until cancelled; then
        that it is gone. A proxy that is away, or refuses, is tried again, after growing pauses; the log says so once,
        and once that it is back. It also says where the proxy has this server and does not reach it."""
        proxy, own = checked(self.proxy_url), ""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        async with httpx.AsyncClient(
            headers=headers, timeout=PATIENCE_S, trust_env=False, verify=tls.checking()
        ) as http:
            has = works = False
            trouble, pause = "", RETRY_S
            try:
                while True:
                    try:
                        own = own or await asyncio.to_thread(self.own_address, url)
                        has = True  # it may have it, where this ends while it still reads
                        body = {"url": own, "status": {"models": list(models())}, "lease": LEASE_S}
                        has, found = await _tell(http, proxy, body)
                    except OSError as error:  # its name is none yet, as where it comes up at the same time
                        has, found = False, f"cannot be found ({error})"
                    if not found and not works:
                        logger.warning("%s gets requests from the proxy %s", own, proxy)
                    elif found and found != trouble:
                        logger.warning("--proxy-url %s: %s; it is tried again, at least once a minute", proxy, found)
                    works, trouble = not found, found
                    await asyncio.sleep(EVERY_S if has else pause)
                    pause = RETRY_S if has else min(2 * pause, LONGEST_S)
            finally:
                if has:
                    with suppress(httpx.HTTPError):  # it finds out by itself
                        await http.post(f"{proxy}/nodes/remove", params={"node_url": own})


async def _tell(http: httpx.AsyncClient, proxy: str, body: dict[str, Any]) -> tuple[bool, str]:
    """(whether the proxy has this server now, why that gets no requests from it; "": it does)."""
    try:
        reply = await http.post(f"{proxy}/nodes/add", json=body)
    except httpx.HTTPError as error:
        return False, f"cannot be told of this server ({tls.why(error)})"
    if not reply.is_success:
        return False, f"refuses this server: {_message(reply)}"
    return True, _unreached(reply, body["url"])


def _unreached(reply: httpx.Response, own: str) -> str:
    """Why a proxy of ours that has this server sends it nothing."""
    try:
        node = reply.json()
        healthy, reason = node["healthy"], node["reason"]
    except (ValueError, LookupError, TypeError):  # another program, which does not say
        return ""
    if healthy is not False or reason == UNSEEN:
        return ""
    told = " ".join(str(reason).split())[:300]
    return f"sends no requests to {own} ({told}); is that where it reaches this server (--node-url)?"


def _message(reply: httpx.Response) -> str:
    """What an error says, without the JSON around it."""
    try:
        text = str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):  # another program than a proxy of ours
        text = f"{reply.status_code} {reply.text}"
    return " ".join(text.split())[:500]
