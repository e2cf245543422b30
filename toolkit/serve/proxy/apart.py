"""Prompts on some nodes, answers on others: LMDeploy's DistServe.

A request goes to a node that lends (``--role prefill``), which computes its prompt alone, and then, with the name of
that node's engine, to one that takes blocks over. Whatever fails of the first part is no matter: the other node
computes what it does not find."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2 as httpx
import orjson
from pydantic_core import from_json

from toolkit.serve.proxy.ask import OddAnswer, ask, plain, posted
from toolkit.serve.proxy.nodes import Lends, Node
from toolkit.serve.proxy.strategies import strategy

if TYPE_CHECKING:
    from toolkit.serve.proxy.forward import Incoming
    from toolkit.serve.proxy.state import ProxyState

logger = logging.getLogger("toolkit.proxy")
INFO, CONNECT = "/distserve/engine_info", "/distserve/p2p_connect"
PREFILL, DECODE = "Prefill", "Decode"
# Whose prompts others may compute. A conversation of /v1/chat/interactive is one server's.
GENERATES = frozenset(
    "/v1/chat/completions /v1/completions /v1/responses /v1/messages /generate /api/chat /api/generate "
    "/completion".split()
)
# With the first two nothing is taken from a cache; of the others the node that writes the answer alone knows all.
WHOLE = ("echo", "prompt_logprobs", "previous_response_id", "background")
AGAIN_S = 30.0  # after which two engines that could not be connected are tried again
LOOK_S = 0.25  # how often it is looked whether a node that computes a prompt is there still
WILD = ("0.0.0.0", "::", "")
Link = tuple[str, str, str]  # a node's URL and its engine's id, and that of the engine it takes blocks from


class Apart:
    """What the proxy knows of who takes blocks from whom. ``least``: bytes of a body from which its prompt goes to
    another node."""

    def __init__(self, state: ProxyState, least: int) -> None:
        self._state = state
        self._least = least
        self.strategy = strategy(state.settings.strategy)  # of nodes that lend: it remembers what was sent where
        self._linked: dict[Link, float] = {}  # until when that holds
        self._linking: dict[Link, asyncio.Task[bool]] = {}

    async def look(self, node: Node) -> None:
        """Ask a node for its role. One that has none does prompts and answers. Raises httpx.HTTPError, OddAnswer."""
        status, said = await ask(self._state.http, node.url + INFO, self._state.key_headers(node))
        if status == 401:
            logger.warning("%s: its role is not known: it asks for a key, which --node-key tells", node.url)
        role, node.engine_id, node.lends = _read(said, node) if status == 200 else ("", "", None)
        if node.role and not role:
            logger.warning("%s: hands no blocks over any more; it does prompts and answers", node.url)
        node.role = role

    def split(self, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        """(those that compute prompts, those that write answers). Where one kind lacks, the other does both."""
        lending = [node for node in nodes if node.role == PREFILL]
        others = [node for node in nodes if node.role != PREFILL]
        taken = any(node.role == DECODE for node in others)
        return (lending if taken else []), others or lending

    def takers(self, nodes: Sequence[Node]) -> list[Node]:
        """Those that take blocks over: others would compute once more what has been lent."""
        return [node for node in nodes if node.role == DECODE]

    def wants(self, request: Incoming) -> bool:
        """Whether a request's prompt is worth a node of its own."""
        if request.path not in GENERATES or not isinstance(request.data, dict) or len(request.body) < self._least:
            return False
        return not any(request.data.get(name) for name in WHOLE)

    async def lent(self, nodes: list[Node], data: Any, compute: Callable[[Node], Awaitable[bool]]) -> Node | None:
        """The node that has computed a prompt; None where none could. ``compute``: has one do it, True where it has."""
        left = [node for node in nodes if node.down is None and node.lends is not None]
        for _ in range(2):
            if not left:
                break
            node = self.strategy(left, data, self._state.clock())
            left.remove(node)
            if await self._while_up(node, compute):
                self._state.metrics.lent.labels("lent").inc()
                return node
        self._state.metrics.lent.labels("alone").inc()
        return None

    async def _while_up(self, node: Node, compute: Callable[[Node], Awaitable[bool]]) -> bool:
        """``compute(node)``, until the node is found to be down: it may stand still with the connection open."""
        work = asyncio.ensure_future(compute(node))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=LOOK_S)
                if node.down is not None and not work.done():
                    return False
            return work.result()
        finally:
            work.cancel()

    async def linked(self, node: Node, lender: Node) -> str:
        """The id of the lender's engine where ``node`` takes blocks from it, "" where not. The operator's nodes connect
        to no address that a client's says."""
        lends = lender.lends
        if lends is None or node.role != DECODE or node.trusted > lender.trusted:
            return ""
        name, now = (node.url, node.engine_id, lends.engine_id), self._state.clock()
        until = self._linked.get(name, float("-inf"))
        if until < now:
            task = self._linking.get(name)
            if task is None:
                task = self._linking[name] = asyncio.create_task(self._link(node, lender.url, lends))
                task.add_done_callback(lambda _: self._linking.pop(name, None))
            until = self._linked[name] = float("inf") if await asyncio.shield(task) else now + AGAIN_S
            self._forget()
        return lends.engine_id if until == float("inf") else ""

    def _forget(self) -> None:
        """What is known of engines that are there no more."""
        lending = {node.lends.engine_id for node in self._state.nodes if node.lends is not None}
        taking = {(node.url, node.engine_id) for node in self._state.nodes}
        self._linked = {x: until for x, until in self._linked.items() if x[2] in lending and x[:2] in taking}

    async def _link(self, node: Node, lender: str, lends: Lends) -> bool:
        body = {
            "remote_engine_id": lends.engine_id,
            "remote_kvtransfer_endpoint_info": [{"protocol": "TCP", "endpoint_info": lends.endpoint_info}],
        }
        try:
            status, said = await posted(self._state.http, node.url + CONNECT, self._state.key_headers(node), body)
            told = from_json(said) if status == 200 else {"message": f"HTTP {status}"}
            if told.get("status") == 1:
                logger.info("%s takes blocks from %s", node.url, lender)
                return True
            why = plain(str(told.get("message", "")))
        except (httpx.HTTPError, OddAnswer, ValueError, AttributeError) as error:
            why = plain(f"{type(error).__name__}: {error}")
        logger.warning("%s takes no blocks from %s, and computes prompts itself: %s", node.url, lender, why)
        return False


def _read(said: bytes, node: Node) -> tuple[str, str, Lends | None]:
    """Role, the engine's id, and what it lends, of an answer of engine_info; no role where it hands nothing over, as
    with new weights. Raises OddAnswer for one that is none."""
    try:
        found = from_json(said)
        role, info = found["role"], from_json(found["endpoint_info"])
        if not found["engine_id"]:
            return "", "", None
        host, _, port = info["address"].rpartition(":")
        if host.strip("[]") in WILD and port:  # the node knows not by which address it is reached
            name = urlsplit(node.url).hostname or ""
            info["address"] = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        engine_id = str(found["engine_id"])
        lends = Lends(engine_id, orjson.dumps(info).decode()) if role == PREFILL else None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OddAnswer(f"{INFO}: not what it should be ({type(error).__name__})") from error
    return (role, engine_id, lends) if role in (PREFILL, DECODE) else ("", "", None)
