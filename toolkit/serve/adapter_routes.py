"""How clients and a watched folder load and unload LoRA adapters while the server runs; named as in vLLM."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response as HttpResponse

from toolkit.artifacts.adapters.config import CONFIG
from toolkit.configs.checks import shown
from toolkit.configs.option import spelled
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.control_routes import allowed
from toolkit.serve.fields.strict import Strict
from toolkit.serve.generation.read import parse
from toolkit.serve.http.errors import ApiError, bad_field
from toolkit.serve.http.openapi.answers import AdapterChanged
from toolkit.serve.http.openapi.schema import FORBIDDEN, describe
from toolkit.serve.http.replies import json_response
from toolkit.serve.model_cards import MOST_NAME, good_name
from toolkit.serve.state import ServerState

log = logging.getLogger(__name__)
router = APIRouter()
LOOK_S = 2.0  # between two looks into the folder


class LoadAdapterRequest(Strict):
    """An adapter below the server's ``--adapter-dir``, and the name that requests are to use."""

    lora_name: str = Field(min_length=1, max_length=200, description="What requests name as model.")
    lora_path: str = Field(description="Its folder, also as a path below --adapter-dir.")


class UnloadAdapterRequest(Strict):
    """An adapter that is to go once the requests that use it have ended."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = Field(None, description="As vLLM has it; names alone count here.")


BODIES: list[type[BaseModel]] = [LoadAdapterRequest, UnloadAdapterRequest]


@router.post(
    "/v1/load_lora_adapter",
    **describe(LoadAdapterRequest, "Load a LoRA adapter; needs --adapter-dir", AdapterChanged, also=FORBIDDEN),
)
async def load_lora_adapter(raw: Request) -> HttpResponse:
    allowed(raw, "adapter_dir")
    state, request, _ = await parse(raw, LoadAdapterRequest)
    folder = state.settings.adapter_dir
    assert folder is not None
    found = below(folder, request.lora_path)
    try:
        await asyncio.to_thread(load, state, request.lora_name, found)
    except ToolkitError as e:
        raise _answer(state, e) from e
    return json_response({"loaded": request.lora_name, "adapters": list(state.adapters)})


@router.post(
    "/v1/unload_lora_adapter",
    **describe(UnloadAdapterRequest, "Unload a LoRA adapter; needs --adapter-dir", AdapterChanged, also=FORBIDDEN),
)
async def unload_lora_adapter(raw: Request) -> HttpResponse:
    allowed(raw, "adapter_dir")
    state, request, _ = await parse(raw, UnloadAdapterRequest)
    there = request.lora_name in state.adapters
    try:
        await asyncio.to_thread(unload, state, request.lora_name)
    except ToolkitError as e:
        if not there and isinstance(e, UsageError):
            raise ApiError(404, str(e), param="lora_name", code="adapter_not_found") from e
        raise _answer(state, e) from e
    return json_response({"loaded": None, "adapters": list(state.adapters)})


def below(folder: Path, path: str) -> Path:
    """``path``, relative to ``folder``. Raises ApiError for one elsewhere, and for what is none."""
    try:
        found = (folder / path).resolve()
        if found.is_relative_to(folder.resolve()):
            return found
    except (OSError, ValueError, RuntimeError):  # it has a NUL in it, or links lead in a circle
        pass
    raise bad_field("lora_path", f"expected one below {folder} (the server's {spelled('adapter_dir')})")


def _answer(state: ServerState, error: ToolkitError) -> ApiError:
    return state.unavailable() or ApiError(400, str(error), code="bad_adapter")


def load(state: ServerState, name: str, path: Path) -> None:
    """Have requests use the adapter in a folder by ``name``. Raises UsageError, ToolkitError."""
    if not good_name(name):
        raise UsageError(f"lora_name: expected up to {MOST_NAME} visible characters, found {shown(name)}")
    with state.adapter_turn:  # else one that unloads it at once leaves a name that is here and not in the engine
        if name in state.model_names:
            raise UsageError(f"lora_name: {name!r} is taken; unload that one first, or choose another name")
        if not os.path.isdir(path):  # which a name that is too long does not fail
            raise UsageError(f"lora_path: {path}: no such directory")
        state.engine.adapters.load(name, path)
        if name in state.settings.adapters:
            state.unloaded.discard(name)
        else:
            state.loaded[name] = path


def unload(state: ServerState, name: str) -> None:
    """Take no more requests for it. Raises UsageError, ToolkitError."""
    with state.adapter_turn:
        state.engine.adapters.unload(name)
        if state.loaded.pop(name, None) is None:
            state.unloaded.add(name)


class Watch:
    """Keeps the adapters of a folder loaded under the names of their folders: those that come, until they go. One that
    cannot be is told of once, and tried again when it changes. While the engine is down nothing is tried."""

    def __init__(self, state: ServerState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._bad: dict[str, list[tuple[str, int, int]]] = {}  # files, their sizes and times then
        self._known: set[str] = set()
        self._away = False  # the folder, at the last look

    def look(self) -> None:
        """Load what is new, unload what is gone. A name that a client has unloaded stays so while its folder stays."""
        if not self._state.engine.healthy:  # no adapter is to blame for that
            return
        try:
            found = {path.parent.name: path.parent for path in sorted(self._folder.glob(f"[!.]*/{CONFIG}"))}
        except OSError as e:  # a disk that fails, a network's that is away: what is loaded stays
            if not self._away:
                log.warning("%s %s: cannot be read now (%s)", spelled("adapter_dir"), self._folder, e.strerror)
            self._away = True
            return
        self._away = False
        for name in self._bad.keys() - found.keys():  # what comes back under the name is tried anew
            del self._bad[name]
        for name in self._known - found.keys():
            if name in self._state.adapters:
                try:
                    unload(self._state, name)
                except ToolkitError as e:  # the engine has gone down: at the next look
                    log.warning("adapter %s: %s", name, e)
                    continue
            self._known.discard(name)
        for name, path in found.items():
            if name in self._known or name in self._state.model_names:
                continue
            try:
                files = sorted((f.name, (s := f.stat()).st_size, s.st_mtime_ns) for f in path.iterdir())
            except OSError as e:
                log.warning("adapter %s: %s", name, e)
                continue
            if self._bad.get(name) == files:
                continue
            try:
                load(self._state, name, path)
                self._known.add(name)
            except ToolkitError as e:
                log.warning("adapter %s: %s", name, e)
                if self._state.engine.healthy:  # else it may not be its fault
                    self._bad[name] = files

    async def keep(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)
