"""Looks at the nodes: whether they are healthy, and what they serve."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress

import httpx2 as httpx

from toolkit.base import tls
from toolkit.errors import ToolkitError
from toolkit.serve.proxy.ask import OddAnswer, ask, model_names, plain, proxies
from toolkit.serve.proxy.nodes import ITSELF, LEADS_BACK, UNSEEN, Node
from toolkit.serve.proxy.state import ProxyState

logger = logging.getLogger("toolkit.proxy")
TICK_S = 0.1
FIRST_LOOK_S = 2.0


async def watch(state: ProxyState) -> None:
    """Look at each node in its time, until cancelled."""
    looking: dict[str, asyncio.Task[None]] = {}
    while True:
        try:
            state.nodes.drop_expired()
        except ToolkitError as error:  # its file cannot be written, as where the disk is full
            logger.error("%s", error)
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
    """Ask a node how it is and what it serves. One that does not answer well, or leads back here, gets no requests."""
    try:
        status, said = await ask(state.http, f"{node.url}/health", {})
        node.proxies = proxies(said)
        if state.id in node.proxies:
            node.models = []
            raise OddAnswer(ITSELF if node.proxies[0] == state.id else LEADS_BACK)
        if status != 200:
            raise OddAnswer(f"/health says {status}")
        status, said = await ask(state.http, f"{node.url}/v1/models", state.key_headers(node))
        names = model_names(said) if status == 200 else None  # it may ask for a key
        if names is not None:
            node.models = names
        if state.apart is not None:
            await state.apart.look(node)
        if node.down is not None:
            logger.warning("%s: gets requests now", node.url)
        node.down = None
    except (httpx.HTTPError, OddAnswer) as error:
        named = f"{type(error).__name__}: {tls.why(error)}" if isinstance(error, httpx.HTTPError) else str(error)
        why = plain(named)
        if node.down is None or node.down == UNSEEN:
            logger.warning("%s: gets no requests: %s", node.url, why)
        node.failed(why, state.clock())
        if node.loops:  # two that refuse each other at once would think better of it at once, and so on
            node.look_at += random.uniform(0, node.look_at - state.clock())
