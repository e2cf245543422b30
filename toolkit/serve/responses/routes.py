"""POST /v1/responses and /v1/responses/input_tokens, and GET and DELETE of those that are kept."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.config_checks import shown
from toolkit.serve.answers import CountedInput, DeletedResponse, StoredResponse
from toolkit.serve.chat import Chat
from toolkit.serve.errors import ApiError
from toolkit.serve.protocol import ChatCompletionRequest
from toolkit.serve.replies import COMMENT, EventReply, JsonReply, Wire, json_response, named_event
from toolkit.serve.requests import encode_chat, parse, translated
from toolkit.serve.responses.asked import chat_request, conversation
from toolkit.serve.responses.fields import InputTokensRequest, ResponsesRequest
from toolkit.serve.responses.told import Told
from toolkit.serve.schema import answered, describe
from toolkit.serve.state import ServerState

router = APIRouter()
BODIES: list[type[BaseModel]] = [ResponsesRequest, InputTokensRequest]


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
    request, talk, size = await _translated(state, asked, asked.model, size)
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


@router.post(
    "/v1/responses/input_tokens", **describe(InputTokensRequest, "The tokens of what would be answered", CountedInput)
)
async def input_tokens(raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    asked, size = await parse(raw, state, InputTokensRequest)
    request, _, size = await _translated(state, asked, asked.model or state.model_name, size)
    state.check_ready(request.model, waits=False)
    token_ids, *_ = await encode_chat(state, request, size, "input_tokens", limited=False)
    return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact() -> HttpResponse:
    raise ApiError(
        404, "conversations are not compacted here; ask the model itself for a summary", code="route_not_found"
    )


async def _translated(
    state: ServerState, asked: ResponsesRequest | InputTokensRequest, model: str, size: int
) -> tuple[ChatCompletionRequest, list[dict[str, Any]], int]:
    """The request of the chat API; its conversation without the instructions; the bytes of both requests and of what
    is kept."""
    before: list[dict[str, Any]] = []
    if asked.previous_response_id is not None:
        kept = state.kept.get(asked.previous_response_id)
        if kept is None:
            raise _unknown(400, asked.previous_response_id, "previous_response_id")
        before, size = kept.messages, size + kept.size
    talk: list[dict[str, Any]] = []

    def translate() -> ChatCompletionRequest:
        talk.extend((*before, *conversation(asked.input or ())))
        return chat_request(asked, model, talk)

    return await translated(state, translate, size), talk, size


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
