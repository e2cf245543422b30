"""How servers that compute prompts and servers that write answers get to know each other: LMDeploy's ``/distserve``.

Only servers that were started with ``--role`` have any of it. ``endpoint_info`` is a text there, by any means of
transport; here it is JSON, with what ``engine_info`` says of where blocks are lent and of what both must have in
common."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response as HttpResponse

from toolkit.configs.moving import EngineRole
from toolkit.errors import ToolkitError
from toolkit.serve.fields.strict import Strict
from toolkit.serve.generation.read import parse
from toolkit.serve.http.errors import ApiError, bad_field, unless_json
from toolkit.serve.http.openapi.schema import FORBIDDEN, answered, describe
from toolkit.serve.http.replies import json_response
from toolkit.serve.lmdeploy.answers import Connected, EngineInfo, Freed, Initialized
from toolkit.serve.state import ServerState

router = APIRouter()
SUCCESS, FAIL = 1, 2  # LMDeploy's DistServeConnectionStatus
TCP = 1  # of its MigrationProtocol
Protocol = int | str | None  # without effect: the servers' --migration-backend says how


class EndpointInfo(Strict):
    protocol: Protocol = None
    endpoint_info: str = Field(max_length=1 << 14)


class InitRequest(Strict):
    """LMDeploy's DistServeInitRequest."""

    local_engine_id: str
    local_engine_config: dict[str, Any] | None = None
    remote_engine_id: str
    remote_engine_config: dict[str, Any] | None = None
    protocol: Protocol = None
    rank: int | None = None
    tcp_config: dict[str, Any] | None = None
    rdma_config: dict[str, Any] | None = None
    nvlink_config: dict[str, Any] | None = None


class ConnectRequest(Strict):
    """LMDeploy's DistServeConnectionRequest."""

    protocol: Protocol = None
    remote_engine_id: str
    remote_engine_endpoint_info: dict[str, Any] | None = None
    remote_kvtransfer_endpoint_info: list[EndpointInfo] = Field(min_length=1, max_length=64)


class DropRequest(Strict):
    engine_id: str | None = None
    remote_engine_id: str


class FreeRequest(Strict):
    """``remote_session_id``: the id of the answer whose blocks were preserved."""

    remote_engine_id: str | None = None
    remote_session_id: int | str


BODIES: list[type[BaseModel]] = [InitRequest, ConnectRequest, DropRequest, FreeRequest]


def _apart(raw: Request) -> ServerState:
    """The server's state. Raises ApiError where it has no role, and for what a page of somebody else may have sent."""
    state: ServerState = raw.app.state.server
    if state.engine.peers.role == EngineRole.Hybrid:
        raise ApiError(403, f"{raw.url.path}: this server does prompts and answers; it was started without --role")
    if raw.method != "GET" and (error := unless_json(raw)) is not None:
        raise error
    return state


@router.get(
    "/distserve/engine_info", **answered("What other engines must know of this one", EngineInfo, also=FORBIDDEN)
)
async def engine_info(raw: Request) -> HttpResponse:
    state = _apart(raw)
    info = state.engine.peers.info()
    return json_response({**info, "endpoint_info": _endpoint(info)})


@router.post(
    "/distserve/p2p_initialize", **describe(InitRequest, "How to reach this engine", Initialized, also=FORBIDDEN)
)
async def p2p_initialize(raw: Request) -> HttpResponse:
    state = _apart(raw)
    await parse(raw, InitRequest)
    info = state.engine.peers.info()
    ends = [{"protocol": TCP, "endpoint_info": _endpoint(info)}]
    told = {"status": SUCCESS, "engine_endpoint_info": {"zmq_address": ""}, "kvtransfer_endpoint_info": ends}
    return json_response(told)


@router.post(
    "/distserve/p2p_connect", **describe(ConnectRequest, "Take blocks from that engine", Connected, also=FORBIDDEN)
)
async def p2p_connect(raw: Request) -> HttpResponse:
    _apart(raw)
    state, request, _ = await parse(raw, ConnectRequest)
    if state.engine.peers.role == EngineRole.Prefill:
        return json_response({"status": SUCCESS, "message": "this engine lends; it connects to nobody"})
    engine_id, address, secure, in_common = _read(request.remote_kvtransfer_endpoint_info[0].endpoint_info)
    try:
        await asyncio.to_thread(state.engine.peers.connect, engine_id, address, secure, in_common)
    except (ToolkitError, TimeoutError) as error:
        return json_response({"status": FAIL, "message": str(error) or "the engine does not answer"})
    return json_response({"status": SUCCESS, "message": ""})


@router.post("/distserve/p2p_drop_connect", **describe(DropRequest, "Take no more from it", Connected, also=FORBIDDEN))
async def p2p_drop_connect(raw: Request) -> HttpResponse:
    _apart(raw)
    state, request, _ = await parse(raw, DropRequest)
    await asyncio.to_thread(state.engine.peers.drop, request.remote_engine_id)
    return json_response({"status": SUCCESS, "message": ""})


@router.post("/distserve/free_cache", **describe(FreeRequest, "Let preserved blocks go", Freed, also=FORBIDDEN))
async def free_cache(raw: Request) -> HttpResponse:
    _apart(raw)
    state, request, _ = await parse(raw, FreeRequest)
    return json_response({"freed": state.engine.peers.free(str(request.remote_session_id))})


def _endpoint(info: dict[str, Any]) -> str:
    return orjson.dumps({name: info[name] for name in ("engine_id", "address", "tls", "in_common")}).decode()


def _read(text: str) -> tuple[str, str, bool, dict[str, str]]:
    """Inverse of ``_endpoint``. Raises ApiError for anything else."""
    try:
        found = orjson.loads(text)
        told = str(found["engine_id"]), str(found["address"]), found["tls"] is True
        common = {str(name): str(value) for name, value in found["in_common"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = "expected the endpoint_info that the other server's /distserve/engine_info tells"
        raise bad_field("remote_kvtransfer_endpoint_info", what) from error
    return *told, common
