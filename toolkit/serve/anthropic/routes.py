"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.serve.anthropic import told
from toolkit.serve.anthropic.asked import chat_request
from toolkit.serve.anthropic.fields import CountRequest, MessagesRequest
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.read import encode_chat, parse, translated
from toolkit.serve.http.errors import NoThreads
from toolkit.serve.http.openapi.answers import AnthropicMessage, CountedTokens
from toolkit.serve.http.openapi.schema import ANTHROPIC_ERRORS, EVENTS, describe
from toolkit.serve.http.replies import EventReply, JsonReply, Wire, json_response, named_event

router = APIRouter(responses=ANTHROPIC_ERRORS)
BODIES: list[type[BaseModel]] = [MessagesRequest, CountRequest]
WIRE = Wire(named_event, lambda error: error.anthropic(), ping=named_event(told.PING))


@router.post(
    "/v1/messages",
    **describe(MessagesRequest, "Answer a conversation, as Anthropic has it", AnthropicMessage, stream=EVENTS),
)
async def messages(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, MessagesRequest)
    _check(asked)
    request = await translated(state, lambda: chat_request(asked), size)
    state.admit(request, request.token_limit)
    chat = Chat(state, request, size, f"msg_{uuid.uuid4().hex}")
    return EventReply(told.events(chat), WIRE) if asked.stream else JsonReply(lambda: told.whole(chat), WIRE)


@router.post("/v1/messages/count_tokens", **describe(CountRequest, "The tokens of a conversation", CountedTokens))
async def count_tokens(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, CountRequest)
    _check(asked)
    request = await translated(state, lambda: chat_request(asked), size)
    state.check_ready(request.model, waits=False)
    token_ids, *_ = await encode_chat(state, request, size, "count_tokens", limited=False)
    return json_response({"input_tokens": len(token_ids)})


def _check(asked: CountRequest) -> None:
    if asked.thread is not None:
        raise NoThreads
