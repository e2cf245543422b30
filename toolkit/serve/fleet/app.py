"""Builds the ASGI application in front of several models."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response as HttpResponse
from starlette.types import Message, Send

from toolkit.errors import ToolkitError
from toolkit.serve.fleet.fleet import Fleet, Model, Swapped
from toolkit.serve.generation.read import parse_body, read_body
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.application import begin_app
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.layers import add_layers
from toolkit.serve.http.replies import json_response, scraped
from toolkit.serve.model_cards import card, listed
from toolkit.serve.ollama.cards import Listed, add_lists
from toolkit.serve.ollama.fields import ShowRequest, served_as
from toolkit.serve.options import ProxySettings
from toolkit.serve.proxy.forward import Forward, Incoming, NodeFailed, is_stream
from toolkit.serve.proxy.metrics import ProxyMetrics
from toolkit.serve.proxy.nodes import Node
from toolkit.serve.proxy.paths import forwarded
from toolkit.serve.proxy.state import ProxyState

Show = Callable[[Model], dict[str, Any]]  # in a thread; raises ToolkitError


class ToModel(Forward):
    """The answer of one model, which is loaded first where it is not."""

    def __init__(self, state: ProxyState, fleet: Fleet, request: Incoming) -> None:
        super().__init__(state, request)
        self._fleet = fleet

    async def _try_nodes(self, send: Send) -> None:
        name = self._request.model_among(self._fleet.names())
        head: list[tuple[bytes, bytes]] | None = None

        async def noted(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message["headers"]
            await send(message)

        while True:
            try:
                await self._try_model(name, noted)
                return
            except Swapped as error:
                if head is None:
                    continue  # nobody has seen anything of it: it waits for the model's next turn
                if is_stream(head):
                    await self._end_stream(send, error)
                return

    async def _try_model(self, name: str | None, send: Send) -> None:
        if self._state.closing:
            raise ApiError(503, "the server is shutting down; ask again later", code="shutting_down")
        async with self._fleet.using(name) as server:
            node = self._state.nodes.find(server.url) or self._state.nodes.add(server.url, trusted=True)
            node.name, node.down = self._fleet.find(name).listed.name, None
            try:
                await self._ask(node, send)
            except NodeFailed as error:
                raise ApiError(
                    503, f"the model's server failed ({error}); ask again", code="engine_unavailable"
                ) from error

    async def _ask(self, node: Node, send: Send) -> None:
        with self._state.running(node) as run:
            async with self._asked(node) as reply:
                run.status = reply.status_code
                await self._pass_on(reply, node, send)


def create_app(fleet: Fleet, settings: ProxySettings, show: Show, *, metrics: bool = True) -> FastAPI:
    """The application; ``fleet.watch()`` has to run beside it. ``show``: what /api/show tells of a model that is not
    loaded."""
    state = ProxyState(settings)
    state.metrics = ProxyMetrics(state.nodes, of_models=True)
    fleet.on_end = state.nodes.remove
    app = begin_app("toolkit", page=not settings.no_page, docs=False)
    app.state.server = state
    _add_plain_routes(app, state, fleet, metrics)
    _add_forwarding(app, state, fleet, show)
    keys = ApiKeys(settings.api_keys, settings.api_key_file)
    add_layers(app, settings.limits, state.lanes, keys, list(settings.allow_origins))
    return app


def _listed(model: Model) -> list[Listed]:
    """What Ollama's clients are told of a model, by each of its names."""
    memory = model.memory if model.state == "loaded" else None
    return [Listed(name, memory, path=Path(model.listed.path)) for name in model.listed.names]


def _add_plain_routes(app: FastAPI, state: ProxyState, fleet: Fleet, metrics: bool) -> None:
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return listed([card(**told, created=started) for told in fleet.cards()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        fleet.find(name)
        return next(card(**told, created=started) for told in fleet.cards() if told["name"] == name)

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as SageMaker asks
    @app.head("/health")
    @app.get("/v1/health")
    @app.get("/health")
    async def health() -> HttpResponse:
        if state.closing:
            return json_response({"status": "shutting down"}, 503)
        return json_response({"status": "healthy"})

    add_lists(app, lambda: [listed for model in fleet.models for listed in _listed(model)])

    if metrics:

        @app.get("/metrics")
        async def told() -> HttpResponse:
            return scraped(state.metrics.render())


def _add_forwarding(app: FastAPI, state: ProxyState, fleet: Fleet, show: Show) -> None:
    @app.post("/api/show")
    async def shown(raw: Request) -> HttpResponse:
        body = await read_body(raw)
        asked = parse_body(ShowRequest, body)
        named = asked.model or asked.name
        model = fleet.find(served_as(named, fleet.names()) if named else None)
        if model.state == "loaded":
            return ToModel(state, fleet, Incoming(raw.method, forwarded(raw.scope), raw.headers.raw, body, vars(asked)))
        try:
            return json_response(await state.lanes.run(lambda: show(model), 0))
        except ToolkitError as error:
            raise ApiError(503, f"{model.listed.name}: {error}", code="model_not_loaded") from error

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(raw: Request, path: str) -> HttpResponse:
        target = forwarded(raw.scope)
        if raw.method != "POST" and path != "tokenizer_info":
            raise HTTPException(404)  # it names no model: kept responses are looked up at a server of one model
        return ToModel(state, fleet, await Incoming.of(raw, target, state.lanes, state.settings.node_key))
