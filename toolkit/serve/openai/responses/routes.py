"""POST /v1/responses and /v1/responses/input_tokens, and what may be asked of responses that are kept."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.configs.checks import shown
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.history import with_answer
from toolkit.serve.generation.read import encode_chat, parse, translated
from toolkit.serve.http.access.users import current_user
from toolkit.serve.http.errors import ApiError, bad_field
from toolkit.serve.http.handed import handed
from toolkit.serve.http.openapi.answers import CountedInput, DeletedResponse, InputItems, StoredResponse
from toolkit.serve.http.openapi.schema import EVENTS, answered, describe
from toolkit.serve.http.replies import COMMENT, EventReply, JsonReply, Wire, json_response, named_event
from toolkit.serve.openai import lists
from toolkit.serve.openai.responses.asked import chat_request, conversation
from toolkit.serve.openai.responses.fields import InputTokensRequest, Referred, ResponsesRequest
from toolkit.serve.openai.responses.items import input_items, resolve, response_of
from toolkit.serve.openai.responses.kept import Kept
from toolkit.serve.openai.responses.told import Told
from toolkit.serve.state import ServerState

router = APIRouter()
BODIES: list[type[BaseModel]] = [ResponsesRequest, InputTokensRequest]
MOST_ITEMS = 100


def _event(data: dict[str, Any]) -> bytes:
    """An event; of the envelope of an error that comes after others, OpenAI's event of an error."""
    if "type" not in data:
        error = data["error"]
        data = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
    return named_event(data)


WIRE = Wire(_event, ApiError.responses, ping=COMMENT)


@router.post(
    "/v1/responses",
    **describe(ResponsesRequest, "Answer a conversation, as OpenAI's newer API has it", StoredResponse, stream=EVENTS),
)
async def responses(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, ResponsesRequest)
    earlier, owner = _earlier(raw, asked), current_user().owner
    request, talk, size = await _translated(raw, asked, asked.model, size, earlier)
    state.admit(request, request.token_limit)
    chat = Chat(state, request, size, f"resp_{uuid.uuid4().hex}")

    def keep(response: dict[str, Any]) -> None:
        if asked.store is False or handed().lend:
            return
        answer = chat.answers[0]
        more = sum(map(len, (answer.content, answer.reasoning, *(str(call) for call in answer.calls))))
        before = [] if earlier is None else [*earlier.items, *earlier.response["output"]]
        items = [*before, *input_items(chat.id, asked.input)]
        state.kept.put(response, with_answer(talk, answer.message()), items, size + more, owner)

    told = Told(asked, chat, keep)
    return EventReply(told.events(), WIRE) if asked.stream else JsonReply(told.whole, WIRE)


@router.post(
    "/v1/responses/input_tokens", **describe(InputTokensRequest, "The tokens of what would be answered", CountedInput)
)
async def input_tokens(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, InputTokensRequest)
    request, _, size = await _translated(raw, asked, asked.model or state.model_name, size, _earlier(raw, asked))
    state.check_ready(request.model, waits=False)
    token_ids, *_ = await encode_chat(state, request, size, "input_tokens", limited=False)
    return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact() -> HttpResponse:
    raise ApiError(
        404, "conversations are not compacted here; ask the model itself for a summary", code="route_not_found"
    )


def _earlier(raw: Request, asked: ResponsesRequest | InputTokensRequest) -> Kept | None:
    """The response that ``asked`` goes on from."""
    if asked.previous_response_id is None:
        return None
    kept = _mine(raw, asked.previous_response_id)
    if kept is None:
        raise _unknown(400, asked.previous_response_id, "previous_response_id")
    return kept


async def _translated(
    raw: Request, asked: ResponsesRequest | InputTokensRequest, model: str, size: int, earlier: Kept | None
) -> tuple[ChatCompletionRequest, list[dict[str, Any]], int]:
    """The request of the chat API; its conversation without the instructions; the bytes of both requests and of what
    is kept."""
    state: ServerState = raw.app.state.server
    before = [] if earlier is None else earlier.messages
    ids = dict.fromkeys(response_of(item.id) for item in asked.input or () if isinstance(item, Referred))
    named = [kept for id in ids if (kept := _mine(raw, id)) is not None]
    size += sum(kept.size for kept in (*named, *([] if earlier is None else [earlier])))
    talk: list[dict[str, Any]] = []

    def translate() -> ChatCompletionRequest:
        if ids:
            resolve(asked.input or [], (item for kept in named for item in (*kept.items, *kept.response["output"])))
        talk.extend((*before, *conversation(asked.input or ())))
        return chat_request(asked, model, talk)

    return await translated(state, translate, size), talk, size


@router.get("/v1/responses/{id}", **answered("A response that is kept", StoredResponse))
async def response(id: str, raw: Request) -> HttpResponse:
    if raw.query_params.get("stream", "false") != "false":
        raise bad_field("stream", "a response that is kept is told whole; leave it out")
    return json_response(_known(raw, id).response)


@router.delete("/v1/responses/{id}", **answered("Forget a response", DeletedResponse))
async def delete(id: str, raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    if not state.kept.drop(id, current_user().owner):
        raise _unknown(404, id)
    return json_response({"id": id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{id}/input_items",
    **answered("What a kept response was made from, the newest first", InputItems),
    openapi_extra=lists.parameters(MOST_ITEMS, 20, order=lists.ORDER),
)
async def items(id: str, raw: Request) -> HttpResponse:
    limit, known = lists.limit_of(raw, MOST_ITEMS, 20), _known(raw, id)
    return json_response(lists.page(lists.in_order(raw, known.items), raw.query_params.get("after"), limit))


@router.post(
    "/v1/responses/{id}/cancel", **answered("400: only what is made in the background could be cancelled", None)
)
async def cancel(id: str, raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    if not state.runs(id):
        _known(raw, id)
    message = "only what is made in the background can be cancelled; close the connection to end an answer"
    raise ApiError(400, message, code="not_in_background")


def _mine(raw: Request, id: str) -> Kept | None:
    """What is kept for the one who asks."""
    state: ServerState = raw.app.state.server
    return state.kept.get(id, current_user().owner)


def _known(raw: Request, id: str) -> Kept:
    kept = _mine(raw, id)
    if kept is None:
        raise _unknown(404, id)
    return kept


def _unknown(status: int, id: str, param: str | None = None) -> ApiError:
    message = f"the response {shown(id)} is not known here, or no longer kept"
    return ApiError(
        status, f"{param}: {message}" if param else message, param=param, code="previous_response_not_found"
    )
