"""New weights from a trainer, on this machine or another: only where the operator lets clients bring them."""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response as HttpResponse

from toolkit.artifacts.weight_files.new_weight_files import WeightFiles
from toolkit.configs.option import spelled
from toolkit.errors import ToolkitError
from toolkit.serve.control_routes import DRAIN_LOOK_S, allowed
from toolkit.serve.fields.strict import Strict
from toolkit.serve.generation.read import parse
from toolkit.serve.http.errors import ApiError, bad_field
from toolkit.serve.http.openapi.answers import Updated
from toolkit.serve.http.openapi.schema import FORBIDDEN, describe
from toolkit.serve.http.replies import json_response
from toolkit.serve.state import ServerState

router = APIRouter()


class UpdateWeightsRequest(Strict):
    """All tensors of the model, named as in its checkpoint: at a ``path`` of the server, or in base64, in one request
    or several of which the last says ``finished``."""

    serialized_named_tensors: str | list[str] | None = Field(None, description="Base64 of a safetensors file.")
    path: str | None = Field(None, description="A .safetensors file, or a directory of such.")
    load_format: str | None = Field(None, description="As LMDeploy has it: null alone.")
    finished: bool = Field(False, description="Whether this is the last part; a path is always whole.")
    mode: Literal["wait", "abort", "keep"] = Field("wait", description="What becomes of requests that run.")


BODIES: list[type[BaseModel]] = [UpdateWeightsRequest]


@router.post(
    "/update_weights",
    **describe(
        UpdateWeightsRequest, "Replace the model's weights; needs --enable-weight-updates", Updated, also=FORBIDDEN
    ),
)
async def update_weights(raw: Request) -> HttpResponse:
    allowed(raw, "enable_weight_updates")
    state, request, _ = await parse(raw, UpdateWeightsRequest)
    if request.load_format is not None:
        raise bad_field("load_format", "expected null: tensors come as a safetensors file, whose header says all")
    if (request.path is None) == (request.serialized_named_tensors is None):
        raise bad_field("serialized_named_tensors", "expected either it or path")
    async with state.nap:
        files = state.new_weights or WeightFiles()
        state.new_weights = None
        try:
            await asyncio.to_thread(_take, state, request, files)
            if not (request.finished or request.path):
                state.new_weights = files
                return json_response({"updated": False, "tensors": len(files.names)})
            await _replace(state, files, request.mode)
        except ToolkitError as e:  # the whole of it is sent again
            files.close()
            refused = ApiError(400, f"{e}; the weights are what they were, send all parts again")
            raise state.unavailable() or refused from e
        except Exception:  # but where the request is cancelled: the engine may be about to run with them
            files.close()
            raise
    return json_response({"updated": True, "tensors": len(files.names)})


def _take(state: ServerState, request: UpdateWeightsRequest, files: WeightFiles) -> None:
    if request.path is not None:
        if files.names:
            raise bad_field("path", "other parts have come before; the next request starts afresh")
        files.add_copy(_allowed_path(state, request.path))
        return
    told = request.serialized_named_tensors
    if isinstance(told, list):
        if len(told) != 1:
            raise bad_field("serialized_named_tensors", f"expected one entry, for one device, found {len(told)}")
        told = told[0]
    try:
        data = b64decode(told or "", validate=True)
    except (binascii.Error, ValueError) as e:
        raise bad_field("serialized_named_tensors", f"expected base64 ({e})") from e
    try:
        files.add_bytes(data)
    except ToolkitError as e:
        raise bad_field("serialized_named_tensors", str(e)) from e


def _allowed_path(state: ServerState, told: str) -> Path:
    """Below the operator's folder, links followed, so that a client can look at no other file of the server."""
    folder, option = state.settings.weight_updates_path, spelled("weight_updates_path")
    if folder is None:
        raise bad_field("path", f"no files are read here; the server was started without {option}")
    with suppress(OSError, ValueError, RuntimeError):  # a name that is too long, or has a NUL; links in a circle
        found, root = Path(told).resolve(), folder.resolve()
        if found.is_relative_to(root) and all(f.resolve().is_relative_to(root) for f in found.glob("*.safetensors")):
            return found
    raise bad_field("path", f"expected one below {folder} (the server's {option})")


async def _replace(state: ServerState, files: WeightFiles, mode: str) -> None:
    state.draining = mode == "wait"
    try:
        while state.draining and state.admitted:
            await asyncio.sleep(DRAIN_LOOK_S)
        await asyncio.to_thread(state.engine.weights.update, files, mode)
    finally:
        state.draining = False
