"""Builds the ASGI application of one proxy."""

from __future__ import annotations

import time
from typing import Any

import httpx2 as httpx
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from toolkit.serve.fields.strict import Strict
from toolkit.serve.generation.read import parse_body, read_body
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.application import begin_app
from toolkit.serve.http.errors import ApiError, unless_json
from toolkit.serve.http.layers import add_layers
from toolkit.serve.http.openapi.schema import add_schemas, describe
from toolkit.serve.http.replies import json_response, scraped
from toolkit.serve.model_cards import card, listed
from toolkit.serve.ollama.cards import Listed, add_lists
from toolkit.serve.options import ProxySettings
from toolkit.serve.proxy.ask import MOST_PROXIES, OddAnswer, ask, plain
from toolkit.serve.proxy.forward import Forward, Incoming
from toolkit.serve.proxy.nodes import Node
from toolkit.serve.proxy.paths import forwarded
from toolkit.serve.proxy.state import ProxyState
from toolkit.serve.proxy.watch import first_look

BY_CLIENT = "--allow-nodes-by-client"


class NodeStatus(Strict):
    """LMDeploy's; what a node tells by itself may be left out."""

    models: list[str] | None = None
    speed: float | None = Field(None, gt=0, description="In any measure that is the same for all nodes")
    unfinished: int | None = Field(None, description="Without effect")
    latency: list[float] | None = Field(None, description="Without effect")
    role: int | str | None = Field(None, description="Without effect: a node is asked for it")


class AddNode(Strict):
    url: str
    status: NodeStatus | None = None
    lease: float | None = Field(None, gt=0, description="Seconds after which it is forgotten unless added again")


class NodeName(Strict):
    url: str


class OuterCors(CORSMiddleware):
    """None for /nodes/, which no web page has to do with."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at_nodes = scope["type"] == "http" and scope["path"].startswith("/nodes/")
        await (self.app(scope, receive, send) if at_nodes else super().__call__(scope, receive, send))


def create_app(settings: ProxySettings) -> FastAPI:
    """The application; ``watch.watch(app.state.server)`` has to run beside it."""
    state, page, docs = ProxyState(settings), not settings.no_page, not settings.disable_fastapi_docs
    about = "Several servers behind one address, as `tool serve proxy` has it"
    app = begin_app("toolkit proxy", about, page=page, docs=docs)
    app.state.server = state
    _add_node_routes(app, state)
    _add_plain_routes(app, state)
    add_schemas(app, [AddNode, NodeName])
    keys, node_keys = ApiKeys(settings.api_keys, settings.api_key_file), ApiKeys(settings.node_keys)
    under = {"/nodes/": node_keys or keys} if keys or node_keys else None
    add_layers(app, settings.limits, state.lanes, keys, list(settings.allow_origins), under=under, cors=OuterCors)
    return app


def _add_node_routes(app: FastAPI, state: ProxyState) -> None:
    @app.get("/nodes/status", summary="All nodes")
    async def status() -> dict[str, Any]:
        return {node.url: node.status() for node in state.nodes}

    @app.post("/nodes/add", **describe(AddNode, "Add a node, or change what is known of it"))
    async def add(raw: Request) -> HttpResponse:
        _check_may_change(raw, state.settings)
        request = parse_body(AddNode, await read_body(raw))
        status = request.status or NodeStatus.model_validate({})
        node = state.nodes.add(
            request.url, status.models, status.speed, request.lease, trusted=bool(state.settings.node_keys)
        )
        if node.down is not None:  # the answer says how it is
            await first_look(state, node)
        if node.loops:
            state.nodes.remove(node.url)
            raise ApiError(400, f"url: {node.url} is {node.down}", param="url", code="proxy_loop")
        return json_response({"url": node.url, **node.status()})

    @app.post("/nodes/remove", summary="Forget a node: ?node_url=, or {'url': …}; what it is answering goes on")
    async def remove(raw: Request, node_url: str | None = None) -> HttpResponse:
        node = await _named(raw, node_url)
        state.nodes.remove(node.url)
        return json_response({"removed": node.url})

    @app.api_route(
        "/nodes/terminate", methods=["GET", "POST"], summary="End a node and forget it (--allow-terminate-by-client)"
    )
    async def terminate(raw: Request, node_url: str | None = None) -> HttpResponse:
        return json_response(await _terminate(state, [await _named(raw, node_url)]))

    @app.api_route("/nodes/terminate_all", methods=["GET", "POST"], summary="End all nodes and forget them")
    async def terminate_all(raw: Request) -> HttpResponse:
        _check_may_change(raw, state.settings)
        return json_response(await _terminate(state, list(state.nodes)))

    async def _named(raw: Request, node_url: str | None) -> Node:
        _check_may_change(raw, state.settings)
        url = node_url if node_url is not None else parse_body(NodeName, await read_body(raw)).url
        if (node := state.nodes.find(url)) is None:
            raise ApiError(404, f"node_url: no node {url!r:.200}", param="node_url", code="node_not_found")
        return node


def _check_may_change(raw: Request, settings: ProxySettings) -> None:
    """Raise ApiError where a request must not change nodes. One with a node key was let in by ApiKeyMiddleware."""
    if settings.node_keys:
        return
    if not settings.allow_nodes_by_client:
        text = f"{raw.url.path}: not allowed here; start the proxy with --node-keys and send one (or with {BY_CLIENT})"
        raise ApiError(403, text, code="node_keys_missing")
    if (error := unless_json(raw)) is not None and _may_be_a_web_page(raw):
        raise error


def _may_be_a_web_page(raw: Request) -> bool:
    """Whether a page of somebody else may have sent this unasked. Only a GET does not tell where it is from."""
    origin = raw.headers.get("origin")
    return raw.method == "GET" if origin is None else origin.partition("://")[2] != raw.headers.get("host", "")


async def _terminate(state: ProxyState, nodes: list[Node]) -> dict[str, Any]:
    """What each node answered; those that ended are forgotten."""
    told: dict[str, Any] = {}
    for node in nodes:
        url = node.url
        try:
            status, said = await ask(state.http, f"{url}/terminate", state.key_headers(node))
            told[url] = "ended" if status == 200 else f"HTTP {status}: {plain(said.decode(errors='replace'))}"
        except (httpx.HTTPError, OddAnswer) as error:
            told[url] = plain(f"{type(error).__name__}: {error}")
        if told[url] == "ended":
            state.nodes.remove(url)
    return told


def _add_plain_routes(app: FastAPI, state: ProxyState) -> None:
    started = int(time.time())

    @app.get("/v1/models", summary="Names that requests may use")
    async def models() -> dict[str, Any]:
        return listed([card(name, started) for name in state.nodes.models()])

    add_lists(app, lambda: [Listed(name, memory=0) for name in state.nodes.models()])

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as SageMaker asks
    @app.head("/health", include_in_schema=False)
    @app.get("/v1/health", include_in_schema=False)
    @app.get("/health", summary="200 while a node gets requests; needs no key")
    async def health() -> HttpResponse:
        up = sum(node.down is None for node in state.nodes)
        told = {"nodes": up, "proxies": [state.id, *state.nodes.proxies()][:MOST_PROXIES]}  # so that loops are seen
        if state.closing or not up:
            return json_response({"status": "shutting down" if state.closing else "no node is healthy", **told}, 503)
        return json_response({"status": "healthy", **told})

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> HttpResponse:
        return scraped(state.metrics.render())

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def forward(raw: Request, path: str) -> HttpResponse:
        target = forwarded(raw.scope)
        return Forward(state, await Incoming.of(raw, target, state.lanes, state.settings.node_key))
