"""Looks at the nodes: whether they are healthy, and what they serve."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import httpx2 as httpx

from toolkit.base import tls
from toolkit.serve.proxy.nodes import UNSEEN, Node
from toolkit.serve.proxy.state import ProxyState

logger = logging.getLogger("toolkit.proxy")
TICK_S = 0.1
PATIENCE_S = 5.0  # that a node has to say how it is
FIRST_LOOK_S = 2.0
MOST_MODELS = 4096


async def watch(state: ProxyState) -> None:
    """Look at each node in its time, until cancelled."""
    looking: dict[str, asyncio.Task[None]] = {}
    while True:
        state.nodes.drop_expired()
        for node in state.nodes:
            task = looking.get(node.url)
            if node.look_at <= state.clock() and (task is None or task.done()):
                node.look_at = state.clock() + state.settings.heartbeat
                looking[node.url] = asyncio.create_task(look(state, node))
        looking = {url: task for url, task in looking.items() if not task.done()}
        await asyncio.sleep(TICK_S)


async def first_look(state: ProxyState, node: Node) -> None:
    """Look at a node that was just added, for as long as who has added it may wait; after that ``watch`` goes on."""
    node.look_at = state.clock() + state.settings.heartbeat
    with suppress(TimeoutError):
        await asyncio.wait_for(look(state, node), FIRST_LOOK_S)


async def look(state: ProxyState, node: Node) -> None:
    """Ask one node how it is and what it serves. One that does not answer well gets no requests."""
    try:
        health = await state.http.get(f"{node.url}/health", timeout=PATIENCE_S)
        if health.status_code != 200:
            raise ValueError(f"/health says {health.status_code}")
        if models := await _models(state, node):
            node.models = models
        if node.down is not None:
            logger.warning("%s: gets requests now", node.url)
        node.down = None
    except (httpx.HTTPError, ValueError) as error:
        why = f"{type(error).__name__}: {tls.why(error)}" if isinstance(error, httpx.HTTPError) else str(error)
        if node.down is None or node.down == UNSEEN:
            logger.warning("%s: gets no requests: %s", node.url, why)
        node.failed(why, state.clock())


async def _models(state: ProxyState, node: Node) -> list[str] | None:
    """What a node says it serves; None where it does not say (it may ask for a key)."""
    reply = await state.http.get(f"{node.url}/v1/models", headers=state.key_headers(node), timeout=PATIENCE_S)
    try:
        names = [card["id"] for card in reply.json()["data"]][:MOST_MODELS] if reply.status_code == 200 else []
    except (ValueError, LookupError, TypeError):
        return None
    return [name for name in names if isinstance(name, str)] or None
