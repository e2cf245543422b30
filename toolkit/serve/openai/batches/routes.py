"""/v1/files and /v1/batches, as OpenAI has them: files are those of batches alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse
from starlette.responses import Response as HttpResponse

from toolkit.configs.checks import shown
from toolkit.serve.generation.read import left_early, parse
from toolkit.serve.http.access.auth import KEY
from toolkit.serve.http.errors import ApiError, bad_field
from toolkit.serve.http.intake import UPLOADS
from toolkit.serve.http.openapi.schema import BUSY_FILE, answered, describe
from toolkit.serve.http.replies import json_response
from toolkit.serve.openai import lists
from toolkit.serve.openai.batches.answers import BatchCard, BatchList, DeletedFile, FileCard, FileList
from toolkit.serve.openai.batches.batches import Batch, Batches
from toolkit.serve.openai.batches.fields import HOUR, MONTH, BatchRequest
from toolkit.serve.openai.batches.store import Stored, named

router = APIRouter()
BODIES: list[type[BaseModel]] = [BatchRequest]
MOST_BATCHES, MOST_FILES = 100, 10_000  # in a list
MOST_NAME = 255  # characters of a file's
_DIGITS = 9  # of seconds
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "A request a line (JSON lines)"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": HOUR, "maximum": MONTH},
                    },
                }
            }
        },
    }
}


def _mine(raw: Request) -> tuple[Batches, str]:
    """The server's batches, and who asks."""
    batches: Batches = raw.app.state.batches
    return batches, batches.store.owner(raw.scope.get(KEY, b""))


@router.post(UPLOADS, **answered("Keep a file of requests for a batch", FileCard) | {"openapi_extra": FORM})
async def upload(raw: Request) -> HttpResponse:
    batches, owner = _mine(raw)
    declared = raw.headers.get("content-length", "0")
    batches.store.check_room(owner, int(declared) if declared.isdecimal() else 0)
    if not raw.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "Content-Type: expected multipart/form-data with file and purpose", code="content_type")
    async with batches.upload(owner), _form(raw) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise bad_field("file", "required, but missing", "missing_field")
        if purpose != "batch":
            raise bad_field("purpose", f"expected 'batch', found {shown(purpose)}; files serve batches alone here")
        seconds = _seconds(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        name = "".join(c for c in file.filename or "" if c.isprintable())[-MOST_NAME:] or "batch.jsonl"
        limits = batches.store.limits
        kept = limits.file_seconds if seconds is None else min(seconds, limits.file_seconds)
        stored = await batches.store.add(file.file, owner, name, "batch", kept)
    return json_response(stored.card())


@asynccontextmanager
async def _form(raw: Request) -> AsyncIterator[FormData]:
    """The form of an upload, whose file is a temporary one meanwhile. Raises ApiError."""
    try:
        form = await raw.form(max_files=1, max_fields=8, max_part_size=1 << 12)
    except ClientDisconnect as error:
        raise left_early() from error
    except OSError as error:
        text = f"files cannot be kept while they arrive ({error.strerror}); the server's TMPDIR says where"
        raise ApiError(500, text, code="storage_full") from error
    try:
        yield form
    finally:
        await form.close()


def _seconds(anchor: Any, seconds: Any) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad_field("expires_after.anchor", f"expected 'created_at', found {shown(anchor)}")
    number = isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) <= _DIGITS
    if not (number and HOUR <= int(seconds) <= MONTH):
        raise bad_field("expires_after.seconds", f"expected {HOUR} to {MONTH}, found {shown(seconds)}")
    return int(seconds)


@router.get(
    UPLOADS,
    **answered("Files that are kept, the newest first", FileList),
    openapi_extra=lists.parameters(MOST_FILES, MOST_FILES, order=lists.ORDER, purpose={"type": "string"}),
)
async def files(raw: Request) -> HttpResponse:
    batches, owner = _mine(raw)
    query, limit = raw.query_params, lists.limit_of(raw, MOST_FILES, MOST_FILES)
    found = lists.in_order(raw, batches.store.files(owner))
    cards = [file.card() for file in found if query.get("purpose") in (None, file.purpose)]
    return json_response(lists.page(cards, query.get("after") or None, limit))


def _file(raw: Request, id: str) -> Stored:
    batches, owner = _mine(raw)
    return named(batches.store.file(id, owner), "file", id)


@router.get(UPLOADS + "/{id}", **answered("A file that is kept", FileCard))
async def file(id: str, raw: Request) -> HttpResponse:
    return json_response(_file(raw, id).card())


@router.get(
    UPLOADS + "/{id}/content",
    **answered("What stands in a file", None, stream="application/octet-stream"),
    response_class=HttpResponse,
)
async def content(id: str, raw: Request) -> HttpResponse:
    found = _file(raw, id)
    return FileResponse(raw.app.state.batches.store.path(found.id), media_type="application/octet-stream")


@router.delete(UPLOADS + "/{id}", **answered("Forget a file", DeletedFile, also=BUSY_FILE))
async def delete(id: str, raw: Request) -> HttpResponse:
    batches, _ = _mine(raw)
    found = _file(raw, id)
    if (batch := batches.reading(found.id)) is not None:
        raise ApiError(409, f"{batch.id} reads this file; cancel it first", code="file_in_use")
    batches.store.drop(found.id)
    return json_response({"id": found.id, "object": "file", "deleted": True})


@router.post("/v1/batches", **describe(BatchRequest, "Answer the requests of a file", BatchCard))
async def create(raw: Request) -> HttpResponse:
    batches, owner = _mine(raw)
    state, asked, _ = await parse(raw, BatchRequest)
    if state.closing:
        raise ApiError(503, "the server is shutting down; ask again later", code="shutting_down")
    file = batches.store.file(asked.input_file_id, owner)
    if file is None or file.purpose != "batch":
        raise bad_field("input_file_id", f"no such file with the purpose batch: {shown(asked.input_file_id)}")
    most = batches.store.limits.file_seconds
    kept = most if asked.output_expires_after is None else min(asked.output_expires_after.seconds, most)
    batch = await batches.create(file, asked.endpoint, asked.completion_window, asked.metadata, kept)
    return json_response(batch.card())


@router.get(
    "/v1/batches",
    **answered("Batches, the newest first", BatchList),
    openapi_extra=lists.parameters(MOST_BATCHES, 20),
)
async def listed(raw: Request) -> HttpResponse:
    batches, owner = _mine(raw)
    limit, after = lists.limit_of(raw, MOST_BATCHES, 20), raw.query_params.get("after")
    return json_response(lists.page([batch.card() for batch in batches.of(owner)], after or None, limit))


def _batch(raw: Request, id: str) -> Batch:
    batches, owner = _mine(raw)
    return named(batches.get(id, owner), "batch", id)


@router.get("/v1/batches/{id}", **answered("How far a batch is", BatchCard))
async def batch(id: str, raw: Request) -> HttpResponse:
    return json_response(_batch(raw, id).card())


@router.post("/v1/batches/{id}/cancel", **answered("End a batch; its answers so far stay", BatchCard, also=BUSY_FILE))
async def cancel(id: str, raw: Request) -> HttpResponse:
    found = _batch(raw, id)
    if found.ended:
        raise ApiError(409, f"{found.id} has ended already: it is {found.status}", code="batch_ended")
    raw.app.state.batches.cancel(found)
    return json_response(found.card())
