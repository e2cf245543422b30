"""POST /v1/chat/interactive, as LMDeploy had it: the server keeps a conversation, and its KV cache, by session_id."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response as HttpResponse

from toolkit.base.lazy_dataclass import dataclass
from toolkit.messages import Response
from toolkit.serve.fields.message import Messages
from toolkit.serve.fields.protocol import SampledRequest
from toolkit.serve.generation.choice import Choice
from toolkit.serve.generation.choices import run_choices
from toolkit.serve.generation.history import with_answer
from toolkit.serve.generation.read import encode_text, parse, refuse_pictures, run_sized
from toolkit.serve.generation.sampling import generation_config
from toolkit.serve.http.access.users import current_user, sent_digest
from toolkit.serve.http.errors import ApiError, TooLong, bad_field
from toolkit.serve.http.openapi.schema import BUSY, EVENTS, FORGOTTEN, describe
from toolkit.serve.http.replies import LINES, EventReply, JsonReply, json_response
from toolkit.serve.lmdeploy.answers import InteractiveAnswer
from toolkit.serve.lmdeploy.talks import Key, Talk
from toolkit.serve.state import ServerState

if TYPE_CHECKING:
    from toolkit.chat.template import ChatTemplate

router = APIRouter()


class GenerateRequest(SampledRequest):
    """Named as in LMDeploy's /openapi.json, from which clients are generated. ``prompt``: a text, or messages. With
    ``interactive_mode`` it goes on with the session's conversation; without, what was said in the session is forgotten
    first and nothing is kept."""

    prompt: Messages
    session_id: int = Field(-1, ge=-1, le=(1 << 63) - 1, description="Chosen by the client; -1 = none")
    interactive_mode: bool = False
    cancel: bool | None = Field(None, description="End what runs for the session; prompt is not answered")
    request_output_len: int | None = Field(None, ge=1, le=1 << 30, description="Most tokens of the answer")
    adapter_name: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 30, description="OpenAI's name of request_output_len")
    image_url: str | list[str] | None = Field(None, description="Refused: a conversation that is kept is of text alone")

    @model_validator(mode="after")
    def _fits(self) -> GenerateRequest:
        if self.n not in (None, 1):
            raise ValueError("n: expected 1 in a conversation")
        if self.image_url:
            raise ValueError("image_url: not here; send images as parts of messages to /v1/chat/completions")
        if self.max_tokens is not None:
            if self.request_output_len not in (None, self.max_tokens):
                raise ValueError("max_tokens: expected either it or request_output_len")
            self.request_output_len = self.max_tokens
        if self.session_id < 0 and (self.interactive_mode or self.cancel):
            raise ValueError("session_id: expected 0 or more, which says whose conversation it is")
        return self


BODIES: list[type[BaseModel]] = [GenerateRequest]


@router.post(
    "/v1/chat/interactive",
    **describe(
        GenerateRequest,
        "A turn of a conversation that the server keeps",
        InteractiveAnswer,
        stream=EVENTS,
        also=BUSY | FORGOTTEN,
    ),
)
async def interactive(raw: Request) -> HttpResponse:
    state, request, size = await parse(raw, GenerateRequest)
    model = request.adapter_name or request.model
    state.check_ready(model, waits=not request.cancel)
    state.settings.limits.check_work(request, 1, request.request_output_len, state.engine.session_len)
    # Clients choose the numbers of sessions, so they meet where no key is asked for; one that is sent tells them apart.
    owner = current_user().owner or sent_digest(raw.headers)
    turn = Turn(state, request, (owner, request.session_id), state.adapter_of(model), size)
    if request.cancel:
        turn.cancel()
        return json_response(turn.told(Response(), 0, 0))
    return EventReply(turn.chunks(), LINES) if request.stream else JsonReply(turn.whole)


@dataclass(frozen=True)
class Turn:
    """The turn of one request, a body of ``size`` bytes; ``key``: whose conversation."""

    state: ServerState
    request: GenerateRequest
    key: Key
    adapter: str | None
    size: int

    def cancel(self) -> None:
        """End what runs for this session."""
        if (talk := self.state.talks.find(self.key)) is not None:
            talk.cancel()
            self.state.abort(talk.request_id)

    async def whole(self) -> dict[str, Any]:
        answer, counts = Response(), (0, 0)
        async with aclosing(self._deltas()) as deltas:
            async for delta, before, ids in deltas:
                answer.extend(delta)
                counts = before, ids
        return self.told(answer, *counts)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._deltas()) as deltas:
            async for delta, before, ids in deltas:
                yield self.told(delta, before, ids)

    @staticmethod
    def told(answer: Response, before: int, ids: int) -> dict[str, Any]:
        """LMDeploy's reply: ``before`` of the prompt's ``ids`` tokens are the history's."""
        return {
            "text": answer.text,
            "tokens": answer.generate_token_len,
            "input_tokens": ids - before,
            "history_tokens": before,
            "finish_reason": answer.finish_reason,
        }

    async def _full(self, error: TooLong, template: ChatTemplate, asked: list[dict[str, Any]]) -> ApiError:
        """What to say where prompt and history do not fit: which of them is too long."""
        try:
            await encode_text(self.state, lambda: template.render(asked), "prompt", self.size)
        except ApiError:
            return error
        return bad_field(
            "prompt",
            f"{error.found} tokens with the session's history, expected at most {error.most}: the conversation is "
            "full; forget it by interactive_mode=false with this session_id, or take another",
            error.code,
        )

    async def _deltas(self) -> AsyncGenerator[tuple[Response, int, int], None]:
        """(what is new of the answer, tokens of the history, tokens of the prompt)."""
        kept, talks, named = self.request.interactive_mode, self.state.talks, self.key[1] >= 0
        talk = talks.open(self.key, goes_on=kept) if named else Talk("")
        if not kept:
            talk.messages, talk.tokens = [], 0
        try:
            async with aclosing(self._answer(talk, kept)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if named:
                talks.close(self.key, keep=kept)

    async def _answer(self, talk: Talk, kept: bool) -> AsyncGenerator[tuple[Response, int, int], None]:
        state, request = self.state, self.request
        template = state.template_of(self.adapter or state.model_name)
        config = generation_config(state, request, max_new_tokens=request.request_output_len, logprobs=None)
        async with AsyncExitStack() as held:
            with talk.until_started():
                await held.enter_async_context(state.slot())
                asked = await run_sized(state, lambda: [m.for_template() for m in request.prompt], self.size)
                refuse_pictures(asked, "prompt", "kept as text alone; images go to /v1/chat/completions")
                messages, before = [*talk.messages, *asked], talk.tokens
                try:
                    ids = await encode_text(state, lambda: template.render(messages), "prompt", self.size)
                except TooLong as error:
                    raise await self._full(error, template, asked) if talk.messages else error from None
            before = min(before, len(ids))
            choice = Choice(
                0,
                0,
                ids,
                template.with_stops(config),
                self.adapter,
                priority=state.priority(request.priority),
                label=request.session_id if request.session_id >= 0 else None,
                session=talk.name if kept else None,
                salt=request.cache_salt or "",
            )
            text, talk.request_id = "", f"interactive-{uuid.uuid4().hex}"
            async with aclosing(run_choices(state, talk.request_id, [choice])) as stream:
                async for _, delta in stream:
                    text += delta.text
                    if kept and delta.finish_reason is not None:
                        talk.messages = with_answer(messages, {"role": "assistant", "content": text})
                        talk.tokens = len(ids) + delta.generate_token_len
                    yield delta, before, len(ids)
