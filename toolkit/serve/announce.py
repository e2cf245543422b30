"""A server tells a proxy that it is there, again and again: ``--proxy-url``."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2 as httpx

from toolkit.base import tls
from toolkit.errors import UsageError
from toolkit.serve.proxy.nodes import checked

logger = logging.getLogger("toolkit.serve")
EVERY_S = 15.0
LEASE_S = 90.0  # after which a proxy forgets a server that it has heard nothing of
RETRY_S = 2.0
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
                try:
                    checked(url)
                except UsageError as e:
                    raise UsageError(f"{option}: {str(e).partition(': ')[2]}") from e

    def own_address(self, url: str) -> str:
        """``url``, where this server listens, as the proxy reaches it: 0.0.0.0 is no address to connect to."""
        if self.node_url is not None:
            return checked(self.node_url)
        parts = urlsplit(url)
        if parts.hostname not in ("0.0.0.0", "::"):
            return url
        proxy = urlsplit(self.proxy_url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((proxy.hostname or "127.0.0.1", proxy.port or 80))  # sends nothing; tells the way out
            return f"{parts.scheme}://{probe.getsockname()[0]}:{parts.port}"

    async def repeat(self, models: Sequence[str], url: str) -> None:
        """Tell the proxy of this server, which listens at ``url`` and serves ``models``, until cancelled; then that it
        is gone. A proxy that is away is tried again."""
        proxy, own, told = checked(self.proxy_url), self.own_address(url), False
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        body = {"url": own, "status": {"models": list(models)}, "lease": LEASE_S}
        async with httpx.AsyncClient(
            headers=headers, timeout=PATIENCE_S, trust_env=False, verify=tls.checking()
        ) as http:
            try:
                while True:
                    before = told
                    try:
                        reply = await http.post(f"{proxy}/nodes/add", json=body)
                        told = reply.is_success
                        if not told:
                            logger.warning("--proxy-url %s: refuses this server: %.500s", proxy, reply.text)
                        elif not before:
                            logger.warning("%s gets requests from the proxy %s", own, proxy)
                    except httpx.HTTPError as error:
                        told = False
                        logger.warning("--proxy-url %s: cannot be told of this server (%s)", proxy, tls.why(error))
                    await asyncio.sleep(EVERY_S if told else RETRY_S)
            finally:
                if told:
                    with suppress(httpx.HTTPError):  # it finds out by itself
                        await http.post(f"{proxy}/nodes/remove", params={"node_url": own})
