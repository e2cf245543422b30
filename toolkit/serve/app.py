"""Builds the ASGI application of one server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.responses import Response as HttpResponse

from toolkit import __version__
from toolkit.chat.embedded_text import EmbeddedText
from toolkit.engine.pooling import open_head
from toolkit.serve import adapter_routes, control_routes, weight_routes
from toolkit.serve.anthropic import routes as anthropic_routes
from toolkit.serve.generation.parsing import Formats
from toolkit.serve.generation.sampling import choose_defaults
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.access.proxies import Proxies
from toolkit.serve.http.application import begin_app
from toolkit.serve.http.errors import not_served
from toolkit.serve.http.handed import HandedOver
from toolkit.serve.http.layers import add_layers
from toolkit.serve.http.openapi.answers import Health, ModelCard, ModelList
from toolkit.serve.http.openapi.schema import ERRORS, add_schemas, answered
from toolkit.serve.http.replies import json_response, scraped
from toolkit.serve.http.sharing.lanes import Lanes
from toolkit.serve.http.sharing.places import Places
from toolkit.serve.llama_cpp import routes as llama_routes
from toolkit.serve.lmdeploy import distserve_routes, generate_routes, interactive_routes
from toolkit.serve.model_cards import card, listed
from toolkit.serve.ollama import routes as ollama_routes
from toolkit.serve.ollama.cards import add_lists
from toolkit.serve.openai import chat_routes, completion_routes, label_routes, pooling_routes, token_routes
from toolkit.serve.openai.batches import routes as batch_routes
from toolkit.serve.openai.batches.batches import Batches
from toolkit.serve.openai.batches.store import FileStore
from toolkit.serve.openai.responses import routes as responses_routes
from toolkit.serve.openai.responses.kept import Store
from toolkit.serve.options import ServerSettings
from toolkit.serve.state import ServerState, image_rules
from toolkit.serve.watch.metrics import ServerMetrics
from toolkit.serve.watch.traces import Traces
from toolkit.vision.eyes import Eyes

if TYPE_CHECKING:
    from toolkit.chat.template import ChatTemplate
    from toolkit.engine.process.frontend import AsyncEngine

ROUTES = (
    chat_routes,
    completion_routes,
    responses_routes,
    anthropic_routes,
    ollama_routes,
    llama_routes,
    token_routes,
    pooling_routes,
    label_routes,
    batch_routes,
    generate_routes,
    interactive_routes,
    distserve_routes,
    control_routes,
    weight_routes,
    adapter_routes,
)


def create_app(
    engine: AsyncEngine,
    template: ChatTemplate,
    settings: ServerSettings,
    keys: ApiKeys | None = None,
    of_adapters: Mapping[str, ChatTemplate] | None = None,
    files: FileStore | None = None,
) -> FastAPI:
    """The application that serves ``engine``; it neither opens nor closes it. Its state is ``app.state.server``, its
    batches are ``app.state.batches``. ``keys``: those of ``settings``, where they have been read already.
    ``of_adapters``: templates of those that have one of their own. ``files``: of batches, a temporary store by default;
    its owner closes it."""
    limit = settings.max_concurrent_requests
    files = files or FileStore(None, settings.limits)
    lanes, name = Lanes(settings.limits), settings.model_name or engine.model_name
    traced = settings.otlp_traces_endpoint

    def read_by(template: ChatTemplate) -> Formats:
        return Formats.choose(engine.tokenizer, template, settings.tool_call_parser, settings.reasoning_parser)

    state = ServerState(
        engine=engine,
        template=template,
        settings=settings,
        defaults=choose_defaults(settings.generation_config, engine.tokenizer.path),
        metrics=ServerMetrics(engine.stats, None if traced is None else Traces(traced, name), name),
        lanes=lanes,
        head=open_head(engine.tokenizer.path, settings.pooling),
        embedded=EmbeddedText(engine.tokenizer, template),
        eyes=None if engine.blind else Eyes.open(engine.tokenizer.path, image_rules(settings), engine.session_len),
        formats=read_by(template),
        of_adapters={name: (own, read_by(own)) for name, own in (of_adapters or {}).items()},
        kept=Store(settings.limits, files),
        slots=Places(limit) if limit else None,
    )
    state.talks.restore(files)
    about = "The API of `tool serve api_server`: OpenAI's, and Anthropic's, Ollama's and llama.cpp's beside it"
    page, docs = not settings.no_page, not settings.disable_fastapi_docs
    app = begin_app("toolkit", about, page=page, docs=docs, responses=ERRORS)
    app.state.server = state
    app.state.batches = Batches(app, state, files)
    _add_plain_routes(app, state)
    add_lists(app, lambda: ollama_routes.of_one(state))
    for routes in ROUTES:
        app.include_router(routes.router)
    add_schemas(app, [body for routes in ROUTES for body in routes.BODIES])
    known = ApiKeys(settings.api_keys, settings.api_key_file) if keys is None else keys
    files.shared = lambda: len(known) > 1
    trusted = Proxies(settings.trusted_proxy)
    app.add_middleware(HandedOver)
    add_layers(app, settings.limits, lanes, known, list(settings.allow_origins), trusted=trusted, digest=files.owner)
    return app


def _add_plain_routes(app: FastAPI, state: ServerState) -> None:
    started = int(time.time())
    base = {"parent": state.model_name}

    def card_of(name: str) -> dict[str, Any]:
        return card(name, started, max_model_len=state.engine.session_len, **({} if name in state.own_names else base))

    @app.get("/v1/models", **answered("Names that requests may use", ModelList))
    async def models() -> dict[str, Any]:
        return listed([card_of(name) for name in state.model_names])

    @app.get("/v1/models/{name:path}", **answered("One model", ModelCard))
    async def model(name: str) -> dict[str, Any]:
        if name not in state.model_names:
            raise not_served(name, state.model_names)
        return card_of(name)

    healthy = answered("200 when the engine can take requests, 503 when not; needs no key", Health)
    healthy["responses"][503] = healthy["responses"][200] | {"description": "It cannot"}

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as SageMaker asks
    @app.head("/health", include_in_schema=False)
    @app.get("/v1/health", include_in_schema=False)  # as llama.cpp has it, too
    @app.get("/health", **healthy)
    async def health() -> HttpResponse:
        if state.closing:
            return json_response({"status": "shutting down"}, 503)
        if state.sleeping:
            return json_response({"status": "sleeping"})
        outage = state.engine.outage
        if outage is None:
            return json_response({"status": "healthy"})
        return json_response({"status": "unhealthy", "reason": outage.why, "restarting": outage.restarting}, 503)

    @app.get("/version", include_in_schema=False)  # as vLLM has it
    async def version() -> HttpResponse:
        return json_response({"version": __version__})

    if state.settings.disable_metrics:
        return

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> HttpResponse:
        return scraped(state.metrics.render())
