"""What the routes of one proxy share."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2 as httpx

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.tls import checking
from toolkit.configs.checks import shown
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.sharing.lanes import Lanes
from toolkit.serve.options import DIST_SERVE, ProxySettings
from toolkit.serve.proxy.apart import Apart
from toolkit.serve.proxy.metrics import ProxyMetrics
from toolkit.serve.proxy.nodes import ELSEWHERE, Node, Nodes, checked
from toolkit.serve.proxy.strategies import strategy

MOST_SHOWN = 20  # names in a message
# A node whose machine is gone, or cut off, is found out by the system within a minute, however long it may think.
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)  # not on every system
    ),
]


@dataclass
class Run:
    """One request to one node. ``status``: what it answered, 0 = nothing."""

    status: int = 0


class ProxyState:
    """``id``: tells this proxy from all others. ``apart``: where prompts and answers have nodes of their own.
    ``active``: the tasks that answer clients; ``closing``: the proxy is on its way down."""

    def __init__(self, settings: ProxySettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.nodes = Nodes(settings.state_file, clock)
        for url in settings.node:
            self.nodes.add(checked(url, "--node"), trusted=True)
        self.strategy = strategy(settings.strategy)
        self.metrics = ProxyMetrics(self.nodes)
        self.nodes.on_end = self._forget
        self.lanes = Lanes(settings.limits)
        self.id = secrets.token_hex(16)
        silence = settings.node_timeout or None
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
                trust_env=False,
                verify=checking(),
                socket_options=KEEPALIVE,
            ),
            timeout=httpx.Timeout(None, connect=5.0, read=silence, write=silence),
            trust_env=False,
            follow_redirects=False,
        )
        self.apart = Apart(self, settings.prefill_min_bytes) if settings.serving_strategy == DIST_SERVE else None
        self.active: set[asyncio.Task[None] | None] = set()
        self.closing = False

    def candidates(self, model: str | None) -> list[Node]:
        """Nodes for a request. Raises ApiError 503 where there is none, 404 where none serves ``model``."""
        if self.closing:
            raise ApiError(503, "the proxy is shutting down; ask again later", code="shutting_down")
        found = self.nodes.serving(model)
        if not found and not self.nodes.models():
            raise ApiError(503, "the proxy has no nodes; add one by POST /nodes/add", code="no_node")
        if not found:
            known = self.nodes.models()
            names = ", ".join(map(repr, known[:MOST_SHOWN])) + (", …" if len(known) > MOST_SHOWN else "")
            raise ApiError(
                404, f"model: {shown(model)} is served by no node; there are {names}", code="model_not_found"
            )
        return found

    def key_headers(self, node: Node) -> dict[str, str]:
        """The operator's own key, for a node that the operator has named."""
        key = self.settings.node_key
        return {"Authorization": f"Bearer {key}"} if key and node.trusted else {}

    @contextmanager
    def running(self, node: Node) -> Iterator[Run]:
        """Keep the books of one request to ``node``."""
        run, began, task = Run(), self.clock(), asyncio.current_task()
        node.unfinished += 1
        self.active.add(task)
        try:
            yield run
            if 0 < run.status < 500 and run.status not in ELSEWHERE and node.down is None:
                node.worked(self.clock() - began, self.clock())
        finally:
            node.unfinished -= 1
            self.active.discard(task)
            if node.name or self.nodes.find(node.url) is not None:
                self.metrics.requests.labels(node.label, str(run.status)).inc()
                self.metrics.seconds.labels(node.label).observe(self.clock() - began)

    def _forget(self, node: Node) -> None:
        """Tell no more of a node that is gone, but of a model, which goes under its name and comes back."""
        if not node.name:
            self.metrics.forget(node.label)

    def abort_all(self) -> None:
        """End every answer under way."""
        for task in list(self.active):
            if task is not None:
                task.cancel()
