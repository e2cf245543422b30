"""POST /v1/responses, and GET and DELETE of those that are kept."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.config_checks import shown
from toolkit.serve.answers import DeletedResponse, StoredResponse
from toolkit.serve.chat import Chat
from toolkit.serve.errors import ApiError
from toolkit.serve.protocol import ChatCompletionRequest
from toolkit.serve.replies import COMMENT, EventReply, JsonReply, Wire, json_response, named_event
from toolkit.serve.requests import parse, translated
from toolkit.serve.responses.asked import chat_request, conversation
from toolkit.serve.responses.fields import ResponsesRequest
from toolkit.serve.responses.told import Told
from toolkit.serve.schema import answered, describe
from toolkit.serve.state import ServerState

router = APIRouter()
BODIES: list[type[BaseModel]] = [ResponsesRequest]


def _event(data: dict[str, Any]) -> bytes:
    """An event; of the envelope of an error that comes after others, OpenAI's event of an error."""
    if "type" not in data:
        error = data["error"]
        data = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
    return named_event(data)


WIRE = Wire(_event, ApiError.envelope, ping=COMMENT)


@router.post(
    "/v1/responses",
    **describe(
        ResponsesRequest,
        "Answer a conversation, as OpenAI's newer API has it",
        StoredResponse,
        stream="text/event-stream",
    ),
)
async def responses(raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    asked, size = await parse(raw, state, ResponsesRequest)
    before: list[dict[str, Any]] = []
    if asked.previous_response_id is not None:
        kept = state.kept.get(asked.previous_response_id)
        if kept is None:
            raise _unknown(400, asked.previous_response_id, "previous_response_id")
        before, size = kept.messages, size + kept.size
    talk: list[dict[str, Any]] = []

    def translate() -> ChatCompletionRequest:
        talk.extend((*before, *conversation(asked.input)))
        return chat_request(asked, talk)

    request = await translated(state, translate, size)
    state.check_ready(request.model)
    state.settings.limits.check_work(request, 1, request.token_limit, state.engine.session_len)
    chat = Chat(state, request, size, f"resp_{uuid.uuid4().hex}")

    def keep(response: dict[str, Any]) -> None:
        if asked.store is False:
            return
        answer = chat.answers[0]
        more = sum(map(len, (answer.content, answer.reasoning, *(str(call) for call in answer.calls))))
        state.kept.put(response, [*talk, answer.message()], size + more)

    told = Told(asked, chat, keep)
    return EventReply(told.events(), WIRE) if asked.stream else JsonReply(told.whole, WIRE)


@router.get("/v1/responses/{id}", **answered("A response that is kept", StoredResponse))
async def response(id: str, raw: Request) -> HttpResponse:
    kept = raw.app.state.server.kept.get(id)
    if kept is None:
        raise _unknown(404, id)
    return json_response(kept.response)


@router.delete("/v1/responses/{id}", **answered("Forget a response", DeletedResponse))
async def delete(id: str, raw: Request) -> HttpResponse:
    if not raw.app.state.server.kept.drop(id):
        raise _unknown(404, id)
    return json_response({"id": id, "object": "response", "deleted": True})


def _unknown(status: int, id: str, param: str | None = None) -> ApiError:
    message = f"the response {shown(id)} is not known here, or no longer kept"
    return ApiError(
        status, f"{param}: {message}" if param else message, param=param, code="previous_response_not_found"
    )
