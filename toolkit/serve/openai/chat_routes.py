"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.messages import Response
from toolkit.parsers.pieces import Piece
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.read import parse
from toolkit.serve.generation.running import running
from toolkit.serve.http.openapi.answers import ChatCompletion
from toolkit.serve.http.openapi.schema import EVENTS, describe
from toolkit.serve.http.replies import EventReply, JsonReply
from toolkit.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from toolkit.serve.state import ServerState

router = APIRouter()
BODIES: list[type[BaseModel]] = [ChatCompletionRequest]


@router.post(
    "/v1/chat/completions",
    **describe(ChatCompletionRequest, "Answer a conversation", ChatCompletion, stream=EVENTS),
)
async def chat_completions(raw: Request) -> HttpResponse:
    state, request, size = await parse(raw, ChatCompletionRequest)
    state.admit(request, request.token_limit)
    answer = ChatAnswer(state, request, size)
    return EventReply(answer.chunks()) if request.stream else JsonReply(answer.whole)


class ChatAnswer:
    """The answer to one chat request (a body of ``size`` bytes), whole or in chunks."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest, size: int) -> None:
        self.state = state
        self.request = request
        self.chat = Chat(state, request, size, f"chatcmpl-{uuid.uuid4().hex}")
        self.created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.chat.id, "object": kind, "created": self.created, "model": self.request.model}

    def _logprobs(self, response: Response) -> dict[str, Any] | None:
        top = self.request.logprobs_wanted
        if top is None:
            return None
        tokenizer = self.state.engine.tokenizer
        content = chat_logprobs(tokenizer, response.token_ids, response.logprobs or [], top)
        return {"content": content, "refusal": None}

    async def whole(self) -> dict[str, Any]:
        """The chat.completion object."""
        chat = self.chat
        async with running(chat) as stream:
            answers = [Response() for _ in chat.choices]
            async for index, delta, _ in stream:
                answers[index].extend(delta)
        shows_ids = self.request.return_token_ids
        rows: list[dict[str, Any]] = [
            {
                "index": i,
                "message": chat.answers[i].message(),
                "logprobs": self._logprobs(answer),
                "finish_reason": chat.finish_reason(i, answer),
                "stop_reason": answer.stop_reason,
                **({"token_ids": answer.token_ids} if shows_ids else {}),
                **(await self._routed(answer)),
            }
            for i, answer in enumerate(answers)
        ]
        told = {**self._head("chat.completion"), "choices": rows, "usage": chat.usage.as_dict()}
        if (count := self.request.prompt_logprobs) is not None:
            entries = answers[0].prompt_logprobs or []
            ids = chat.choices[0].token_ids
            tell = partial(prompt_logprobs, self.state.engine.tokenizer, ids, entries, count)
            told["prompt_logprobs"] = await self.state.lanes.run(tell, len(ids))
        if (blocks := answers[0].cache_block_ids) is not None:
            told |= {"cache_block_ids": blocks, "remote_token_ids": answers[0].token_ids}
        return told | self._prompt_ids()

    async def _routed(self, answer: Response) -> dict[str, Any]:
        """Which experts the tokens of a choice went to, where that was asked for."""
        if (routed := answer.routed_experts) is None:
            return {}
        return {"routed_experts": await self.state.lanes.run(routed.tolist, len(routed))}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.chat.choices[0].token_ids} if self.request.return_token_ids else {}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """chat.completion.chunk objects: the role of each choice, its text, its end; then the usage if asked for."""
        head = self._head("chat.completion.chunk")
        if self.request.include_usage:
            head["usage"] = None

        def chunk(
            index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, ids: Any = None
        ) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return {**head, "choices": [choice | {"token_ids": ids} if ids else choice]}

        chat = self.chat
        async with running(chat) as stream:
            begun: set[int] = set()
            routed = [Response() for _ in chat.choices]
            calls = [-1] * len(chat.choices)  # the index of the last one begun
            async for index, delta, pieces in stream:
                if index not in begun:
                    begun.add(index)
                    yield chunk(index, {"role": "assistant", "content": ""}) | self._prompt_ids()
                if delta.prompt_progress is not None:
                    yield chunk(index, {}) | {"prompt_progress": vars(delta.prompt_progress)}
                routed[index].extend(Response(routed_experts=delta.routed_experts))
                logprobs = self._logprobs(delta) if delta.logprobs else None
                ids = delta.token_ids if self.request.return_token_ids else None
                if (logprobs or ids) and not pieces:
                    yield chunk(index, {"content": ""}, logprobs, ids=ids)
                for piece in pieces:
                    calls[index] += piece.kind == "call"
                    yield chunk(index, _delta(piece, calls[index]), logprobs, ids=ids)
                    logprobs = ids = None
                if delta.finish_reason is not None:
                    last = chunk(index, {}, None, chat.finish_reason(index, delta))
                    last["choices"][0] |= {"stop_reason": delta.stop_reason, **await self._routed(routed[index])}
                    yield last
        if self.request.include_usage:
            yield {**head, "choices": [], "usage": chat.usage.as_dict()}


def _delta(piece: Piece, call: int) -> dict[str, Any]:
    """What a chunk says of ``piece``; ``call``: the index of the call that it belongs to."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning_content": piece.text}
    if piece.kind == "call":
        function = {"name": piece.text, "arguments": ""}
        return {"tool_calls": [{"index": call, "id": piece.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": call, "function": {"arguments": piece.text}}]}
