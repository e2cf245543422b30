"""The application that clients speak to: it looks at keys and limits, and hands each request to a replica of the model
that it names. Nothing of Ray is imported here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.responses import Response as HttpResponse
from starlette.types import Send

from toolkit.configs.option import spelled
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.access.users import current_user
from toolkit.serve.http.application import begin_app
from toolkit.serve.http.errors import BUSY, ApiError, not_served
from toolkit.serve.http.layers import add_layers
from toolkit.serve.http.replies import Reply, json_response, scraped, send_error
from toolkit.serve.http.sharing.lanes import Lanes
from toolkit.serve.http.sharing.places import Places
from toolkit.serve.model_cards import listed
from toolkit.serve.ollama.cards import Listed, add_lists
from toolkit.serve.proxy.forward import Incoming, is_stream, last_words
from toolkit.serve.proxy.nodes import ELSEWHERE
from toolkit.serve.proxy.paths import forwarded
from toolkit.serve.ray.asked import Asked
from toolkit.serve.ray.metrics import FrontMetrics, merged
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.replica import REPLICA, Message

logger = logging.getLogger("toolkit.serve")
NAMES_S = 1.0  # between two looks at which names there are, where one is asked for that is not known
SHUN_S = 2.0  # after a replica's 503 in which others are asked: it refuses at once, and so would get most of all
LOOK_S = 5.0  # that replicas have to say how they are
HEARD_S = 10.0  # since a replica's last word, in which it is not asked: while all places are taken, a look waits too


class Gone(Exception):
    """The replica that a request was sent to has ended, or cannot be reached."""


class Busy(Exception):
    """No place at any replica, and none to wait in."""


class Replicas(Protocol):
    """Those of one model."""

    def stream(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
        """The answer of one of them. Raises Gone, Busy."""
        ...

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        """Of all that answer: (name, text)."""
        ...


class Fleet:
    """Models by their names, adapters' and aliases' among them. Raises ApiError for a name that is none. ``places``: of
    all replicas of a model, for which requests wait here, where users have turns; ``most``: that may wait."""

    def __init__(self, models: Mapping[str, Replicas], places: int, most: int) -> None:
        self.models = dict(models)
        self._places = {name: Places(places) for name in models}
        self._most = most
        self._names: dict[str, str] = {}  # adapters and others, and whose they are
        self._look: asyncio.Task[list[dict[str, Any]]] | None = None  # at which names there are, the last one
        self._looked = float("-inf")  # when it began
        self._shunned: dict[str, float] = {}  # replicas, and until when
        self._heard: dict[str, float] = {}  # models, and when one of their replicas last answered something
        self._cards: dict[str, list[dict[str, Any]]] = {}  # as replicas told them last

    @property
    def names(self) -> list[str]:
        """Any thread may ask."""
        return [*self.models, *(name for name in list(self._names) if name not in self.models)]

    async def find(self, name: str | None) -> tuple[str, Replicas]:
        """(the model's own name, its replicas); the first model where no name is given."""
        if name is not None and self._owner(name) is None:
            if self._look is None or (self._look.done() and time.monotonic() - self._looked > NAMES_S):
                self._look, self._looked = asyncio.create_task(self.cards()), time.monotonic()
            await asyncio.shield(self._look)  # whoever else asks meanwhile waits for it, too
        owner = next(iter(self.models)) if name is None else self._owner(name)
        if owner is None:
            raise not_served(name, self.names)
        return owner, self.models[owner]

    def _owner(self, name: str) -> str | None:
        return name if name in self.models else self._names.get(name)

    @asynccontextmanager
    async def place(self, model: str) -> AsyncIterator[None]:
        """One for the user who asks. Raises ApiError 429 where too many wait."""
        places, user = self._places[model], current_user().id
        if not places.may_wait(user, self._most):
            text = f"{model}: {self._most:,} requests wait already (the server's {spelled('max_queue')})"
            raise ApiError(429, f"{text}; try again later", code="too_many_requests")
        async with places.place():
            yield

    def shun(self, replica: str) -> None:
        """It has just refused a request for now."""
        self._shunned[replica] = time.monotonic() + SHUN_S

    @property
    def shunned(self) -> frozenset[str]:
        now = time.monotonic()
        self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        return frozenset(self._shunned)

    def heard(self, model: str) -> None:
        """One of its replicas has just sent a part of an answer."""
        self._heard[model] = time.monotonic()

    def lost(self, model: str) -> None:
        """One of its replicas is gone."""
        self._heard.pop(model, None)

    def _answers(self, model: str) -> bool:
        return time.monotonic() - self._heard.get(model, float("-inf")) < HEARD_S

    async def lives(self, model: str) -> bool:
        """Whether some replica answers."""
        return self._answers(model) or (await _whole(self.models[model], "/health"))[0] == 200

    async def cards(self) -> list[dict[str, Any]]:
        """What each model's replicas say of it in /v1/models, or said before where all are busy. Raises ApiError 503
        where none answers."""
        found = await asyncio.gather(*(_whole(one, "/v1/models") for one in self.models.values()))
        cards: dict[str, dict[str, Any]] = {}
        for model, (status, body) in zip(self.models, found, strict=True):
            if status == 200:
                self._cards[model] = from_json(body)["data"]
            elif model not in self._cards or not self._answers(model):
                raise ApiError(503, f"{model}: its replicas do not answer", code="engine_unavailable")
            for card in self._cards[model]:
                cards.setdefault(card["id"], card)
                self._names[card["id"]] = model
        return list(cards.values())


async def _whole(replicas: Replicas, target: str) -> tuple[int, bytes]:
    """Status and body of a GET; 503 where none comes in time."""
    status, body = 503, b""
    try:
        async with asyncio.timeout(LOOK_S), aclosing(replicas.stream(Asked("GET", target, []))) as messages:
            async for some in messages:
                for message in some:
                    status = message.get("status", status)
                    body += message.get("body", b"")
    except (TimeoutError, Gone, Busy):
        return 503, b""
    return status, body


class Forward(Reply):
    """The answer of one replica; of another where the first has ended, or refuses, before the client has any of it: of
    a stream the first byte, of others all."""

    def __init__(self, fleet: Fleet, incoming: Incoming, metrics: FrontMetrics) -> None:
        super().__init__()
        self._fleet, self._incoming, self._metrics = fleet, incoming, metrics

    async def produce(self, send: Send) -> None:
        try:
            model, replicas = await self._fleet.find(self._incoming.model_among(self._fleet.names))
            async with self._fleet.place(model):
                status = await self._answered(model, replicas, send)
            self._metrics.requests.labels(model, str(status)).inc()
        except ApiError as error:
            self._metrics.requests.labels("", str(error.status)).inc()
            await send_error(send, error, error.envelope_at(self._incoming.path))

    async def _answered(self, model: str, replicas: Replicas, send: Send) -> int:
        """The status that the client has got. Raises ApiError before anything is sent."""
        asked = Asked.of(self._incoming)
        moves = self._incoming.session is None  # else one replica has its history
        if moves:
            asked = replace(asked, avoid=self._fleet.shunned)
        for again in (True, False):
            if not again:
                self._metrics.retries.inc()
            head: Message | None = None
            held: list[Message] = []  # of a whole answer all, until its end is there
            try:
                async with aclosing(replicas.stream(asked)) as answer:
                    async for messages in answer:
                        if head is None:
                            head = messages[0]
                            headers = dict(head["headers"])
                            replica = headers.get(REPLICA, b"").decode()
                            if head["status"] == 503 and BUSY.encode() not in headers:
                                self._fleet.shun(replica)
                            if again and head["status"] in ELSEWHERE:
                                asked = replace(asked, avoid=asked.avoid | {replica}) if moves else asked
                                head = None
                                break
                        self._fleet.heard(model)
                        held += messages
                        over = _is_last(messages[-1])
                        if over or _grows(head):
                            for message in held:
                                await send(message)
                            held.clear()
                        if over:
                            return int(head["status"])
            except Gone as error:
                logger.warning("a replica is gone: %s", error)
                self._fleet.lost(model)
                if head is not None and _grows(head):
                    await self._broken(send, head)
                    return 502
            except Busy as error:
                raise ApiError(429, f"{error}; try again later", code="too_many_requests") from None
        raise ApiError(503, "no replica could answer; ask again", code="no_node")

    async def _broken(self, send: Send, head: Message) -> None:
        """End a stream in its midst so that nobody takes it for a whole one."""
        self._metrics.broken.inc()
        error = ApiError(502, "the replica that sent this answer is gone; ask again", code="node_lost")
        last = last_words(error, self._incoming.path, is_stream(head["headers"]))
        await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _grows(head: Message) -> bool:
    """Whether an answer that begins so is read as it comes."""
    kind = dict(head["headers"]).get(b"content-type", b"")
    return is_stream(head["headers"]) or kind.startswith(b"application/x-ndjson")


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def create_app(settings: RaySettings, keys: ApiKeys, models: Mapping[str, Replicas]) -> FastAPI:
    """The application in front of the replicas of some models."""
    limits, places = settings.limits, settings.bounds[1] * settings.max_ongoing_requests
    fleet, metrics, lanes = Fleet(models, places, limits.max_queue), FrontMetrics(), Lanes(limits)
    about = "Replicas behind one address, as `tool serve ray` has them"
    app = begin_app("toolkit on Ray", about, page=not settings.no_page, docs=not settings.disable_fastapi_docs)
    _add_plain_routes(app, fleet, metrics, settings)

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def forward(raw: Request, path: str) -> HttpResponse:
        target = forwarded(raw.scope)
        return Forward(fleet, await Incoming.of(raw, target, lanes, None), metrics)

    add_layers(app, settings.limits, lanes, keys, list(settings.allow_origins))
    return app


def _add_plain_routes(app: FastAPI, fleet: Fleet, metrics: FrontMetrics, settings: RaySettings) -> None:
    @app.get("/v1/models", summary="Names that requests may use")
    async def models() -> dict[str, Any]:
        return listed(await fleet.cards())

    add_lists(app, lambda: [Listed(name, memory=0) for name in fleet.names])

    @app.head("/health", include_in_schema=False)
    @app.get("/v1/health", include_in_schema=False)
    @app.get("/health", summary="200 while each model has a replica that answers; needs no key")
    async def health() -> HttpResponse:
        found = await asyncio.gather(*(fleet.lives(name) for name in fleet.models))
        down = [name for name, lives in zip(fleet.models, found, strict=True) if not lives]
        if down:
            return json_response({"status": "unhealthy", "reason": f"no replica answers: {', '.join(down)}"}, 503)
        return json_response({"status": "healthy"})

    if settings.disable_metrics:
        return

    @app.get("/metrics", summary="Metrics for Prometheus, of all replicas")
    async def told() -> HttpResponse:
        found = await asyncio.gather(*(one.metrics() for one in fleet.models.values()))
        text = metrics.render() + merged([pair for some in found for pair in some])
        return scraped(text)
