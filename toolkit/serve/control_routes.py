"""What an operator may let clients do to the server: end requests or itself, put the model to sleep and wake it.
``weight_routes.py`` has how they replace its weights."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, Field
from starlette.responses import Response as HttpResponse

from toolkit.configs.option import spelled
from toolkit.engine.nap import PARTS
from toolkit.serve.fields.strict import Strict
from toolkit.serve.generation.read import parse
from toolkit.serve.http.errors import ApiError, bad_field
from toolkit.serve.http.openapi.answers import Aborted, Ending, Sleeping
from toolkit.serve.http.openapi.schema import FORBIDDEN, answered, describe
from toolkit.serve.http.replies import json_response
from toolkit.serve.state import ServerState

router = APIRouter()
DRAIN_LOOK_S = 0.02  # how often it is looked whether the last request has ended


class AbortRequest(Strict):
    """Which of one's own key's requests are to end: one by the ``id`` of its answer, a ``session_id``'s, or all."""

    session_id: int | str | None = None
    request_id: str | None = Field(None, validation_alias=AliasChoices("request_id", "rid"))
    abort_all: bool | None = None


BODIES: list[type[BaseModel]] = [AbortRequest]


def allowed(raw: Request, option: str) -> ServerState:
    """The server's state. Raises ApiError (403) where its operator has not given ``option``."""
    state: ServerState = raw.app.state.server
    if not getattr(state.settings, option):
        raise ApiError(403, f"{raw.url.path}: not allowed here; the server was started without {spelled(option)}")
    return state


@router.post(
    "/abort_request", **describe(AbortRequest, "End requests; needs --enable-abort-handling", Aborted, also=FORBIDDEN)
)
async def abort_request(raw: Request) -> HttpResponse:
    allowed(raw, "enable_abort_handling")
    state, request, _ = await parse(raw, AbortRequest)
    if request.abort_all:
        found = state.abort(everything=True)
    elif not (found := state.abort(request.request_id, request.session_id)):
        raise bad_field("request_id" if request.request_id else "session_id", "no request of it is running")
    return json_response({"aborted": found})


@router.get("/terminate", **answered("End the server; needs --allow-terminate-by-client", Ending, also=FORBIDDEN))
@router.post("/terminate", include_in_schema=False)
async def terminate(raw: Request) -> HttpResponse:
    allowed(raw, "allow_terminate_by_client")
    os.kill(os.getpid(), signal.SIGTERM)
    return json_response({"status": "shutting down"})


@router.post(
    "/sleep",
    **answered(
        "Give the model's memory back once no request runs; needs --enable-sleep-mode", Sleeping, also=FORBIDDEN
    ),
)
async def sleep(raw: Request, level: str = "1") -> HttpResponse:
    state = allowed(raw, "enable_sleep_mode")
    if level not in ("1", "2"):
        raise bad_field("level", f"expected 1 or 2, found {level!r:.20}")
    async with state.nap:
        state.to_sleep = True
        try:
            while state.admitted:
                await asyncio.sleep(DRAIN_LOOK_S)
            await asyncio.to_thread(state.engine.weights.sleep)
        finally:
            state.to_sleep = False
    return _is_sleeping(state)


@router.post("/wake_up", include_in_schema=False)
@router.post(
    "/wakeup", **answered("Load the model again, all of it or by ?tags=weights&tags=kv_cache", Sleeping, also=FORBIDDEN)
)
async def wakeup(raw: Request) -> HttpResponse:
    state = allowed(raw, "enable_sleep_mode")
    async with state.nap:
        await asyncio.to_thread(state.engine.weights.wake, raw.query_params.getlist("tags") or PARTS)
    return _is_sleeping(state)


@router.get("/is_sleeping", **answered("Whether the model sleeps", Sleeping))
async def is_sleeping(raw: Request) -> HttpResponse:
    return _is_sleeping(raw.app.state.server)


def _is_sleeping(state: ServerState) -> HttpResponse:
    told: dict[str, Any] = {"is_sleeping": state.sleeping}
    return json_response(told)
