"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response as HttpResponse

from toolkit.messages import Response
from toolkit.serve.generation import Choice, Usage, run_choices
from toolkit.serve.logprobs import chat_logprobs, prompt_logprobs
from toolkit.serve.protocol import ChatCompletionRequest, NamedTool
from toolkit.serve.replies import EventReply, JsonReply
from toolkit.serve.requests import encode_chat, parse, vocab_size
from toolkit.serve.sampling import choice_config, generation_config
from toolkit.serve.schema import describe
from toolkit.serve.state import ServerState
from toolkit.serve.tools import CallParser, forced_format

router = APIRouter()


@router.post("/v1/chat/completions", **describe(ChatCompletionRequest, "Answer a conversation"))
async def chat_completions(raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    request, size = await parse(raw, state, ChatCompletionRequest)
    state.check_ready(request.model)
    state.settings.limits.check_work(request, 1, request.token_limit, state.engine.session_len)
    answer = ChatAnswer(state, request, size)
    return EventReply(answer.chunks()) if request.stream else JsonReply(answer.whole)


class ChatAnswer:
    """The answer to one chat request (a body of ``size`` bytes), whole or in chunks."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest, size: int) -> None:
        self.state = state
        self.request = request
        self.size = size
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.top = (request.top_logprobs or 0) if request.logprobs else None
        self.functions = [tool["function"] for tool in request.callable_tools]
        if isinstance(request.tool_choice, NamedTool):
            self.functions = [f for f in self.functions if f["name"] == request.tool_choice.function.name]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    async def _choices(self) -> list[Choice]:
        state, request = self.state, self.request
        config = generation_config(
            request,
            state.defaults,
            max_new_tokens=request.token_limit,
            logprobs=self.top,
            vocab_size=vocab_size(state),
            prompt_logprobs=request.prompt_logprobs,
        )
        config = state.template.with_stops(config)
        token_ids = await encode_chat(state, request, self.size, self.id)
        if request.must_call and state.template.tool_format is not None:
            config = replace(config, response_format=forced_format(state.template.tool_format, self.functions))
        common: Any = {"priority": request.priority or 0, "label": request.session_id}
        adapter = state.adapter_of(request.model)
        return [Choice(i, 0, token_ids, choice_config(config, i), adapter, **common) for i in range(request.n or 1)]

    def _parser(self) -> CallParser:
        """For the answer of one choice to a request with tools."""
        form = self.state.template.tool_format or "hermes"
        single = self.request.parallel_tool_calls is False
        return CallParser(form, [f["name"] for f in self.functions], self.request.must_call, single)

    def _logprobs(self, response: Response) -> dict[str, Any] | None:
        if self.top is None:
            return None
        tokenizer = self.state.engine.tokenizer
        content = chat_logprobs(tokenizer, response.token_ids, response.logprobs or [], self.top)
        return {"content": content, "refusal": None}

    async def whole(self) -> dict[str, Any]:
        """The chat.completion object."""
        async with self.state.slot():
            choices = await self._choices()
            usage = Usage(choices)
            answers = [Response() for _ in choices]
            async with aclosing(run_choices(self.state, self.id, choices)) as stream:
                async for index, delta in stream:
                    usage.add(index, delta)
                    answers[index].extend(delta)
        rows = [
            {
                "index": i,
                "message": message,
                "logprobs": self._logprobs(answer),
                "finish_reason": _finish(answer, bool(message.get("tool_calls"))),
                "stop_reason": answer.stop_reason,
            }
            for i, (answer, message) in enumerate((a, self._message(a)) for a in answers)
        ]
        told = {**self._head("chat.completion"), "choices": rows, "usage": usage.as_dict()}
        if (count := self.request.prompt_logprobs) is not None:
            entries = answers[0].prompt_logprobs or []
            ids = choices[0].token_ids
            tell = partial(prompt_logprobs, self.state.engine.tokenizer, ids, entries, count)
            told["prompt_logprobs"] = await self.state.lanes.run(tell, len(ids))
        return told

    def _message(self, answer: Response) -> dict[str, Any]:
        if not self.functions:
            return {"role": "assistant", "content": answer.text}
        parser = self._parser()
        content = parser.add(answer.text) + parser.finish()
        if not parser.calls:
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": content or None, "tool_calls": parser.calls}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """chat.completion.chunk objects: the role of each choice, its text, its end; then the usage if asked for."""
        head = self._head("chat.completion.chunk")
        if self.request.include_usage:
            head["usage"] = None

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return {**head, "choices": [choice]}

        async with self.state.slot():
            choices = await self._choices()
            usage = Usage(choices)
            begun: set[int] = set()
            parsers = [self._parser() for _ in choices] if self.functions else []
            async with aclosing(run_choices(self.state, self.id, choices)) as stream:
                async for index, delta in stream:
                    usage.add(index, delta)
                    if index not in begun:
                        begun.add(index)
                        yield chunk(index, {"role": "assistant", "content": ""})
                    logprobs = self._logprobs(delta) if delta.logprobs else None
                    parser = parsers[index] if parsers else None
                    known = len(parser.calls) if parser else 0
                    text = delta.text
                    if parser is not None:
                        text = parser.add(text) + (parser.finish() if delta.finish_reason is not None else "")
                    if text or logprobs:
                        yield chunk(index, {"content": text}, logprobs)
                    calls = parser.calls if parser else []
                    for i in range(known, len(calls)):
                        yield chunk(index, {"tool_calls": [{"index": i, **calls[i]}]})
                    if delta.finish_reason is not None:
                        last = chunk(index, {}, None, _finish(delta, bool(calls)))
                        last["choices"][0]["stop_reason"] = delta.stop_reason
                        yield last
        if self.request.include_usage:
            yield {**head, "choices": [], "usage": usage.as_dict()}


def _finish(answer: Response, called: bool) -> str | None:
    return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason
