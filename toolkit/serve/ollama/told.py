"""Answers as Ollama's API has them: one object, or one for each piece, the last with what it took."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import perf_counter_ns, time
from typing import Any, Literal

from toolkit.messages import Response
from toolkit.parsers.pieces import Piece, arguments_of
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.plain import Plain
from toolkit.serve.generation.running import running
from toolkit.serve.model_cards import utc
from toolkit.serve.openai.logprobs import chat_logprobs

Kind = Literal["chat", "generate"]
Call = dict[str, Any]


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": utc(time())}


def loaded(kind: Kind, name: str) -> dict[str, Any]:
    """What a request without a prompt is told: the model is there."""
    return _head(name) | _said(kind) | {"done_reason": "load", "done": True}


def _said(kind: Kind, content: str = "", thinking: str = "", calls: Sequence[Call] = ()) -> dict[str, Any]:
    thought = {"thinking": thinking} if thinking else {}
    if kind == "generate":
        return {"response": content, **thought}
    message: dict[str, Any] = {"role": "assistant", "content": content, **thought}
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def _call(index: int, call: Call) -> Call:
    function = {"index": index, "name": call["function"]["name"], "arguments": arguments_of(call)}
    return {"id": call["id"], "function": function}


class Told:
    """The answer that ``run`` gives, to a request for the model ``name``; ``top``: how many log-probabilities it wants
    beside each token's own, None: not even that."""

    def __init__(self, kind: Kind, run: Chat | Plain, name: str, top: int | None) -> None:
        self._kind = kind
        self._run = run
        self._name = name
        self._top = top
        self._began = self._first = perf_counter_ns()

    def _logprobs(self, response: Response) -> dict[str, Any]:
        if self._top is None or not response.logprobs:
            return {}
        tokenizer = self._run.state.engine.tokenizer
        return {"logprobs": chat_logprobs(tokenizer, response.token_ids, response.logprobs, self._top)}

    async def _deltas(self) -> AsyncGenerator[tuple[Response, list[Piece]], None]:
        run, begun = self._run, False
        async with running(run) as stream:
            async for _, delta, pieces in stream:
                if not begun:
                    begun, self._first = True, perf_counter_ns()
                yield delta, pieces

    async def whole(self) -> dict[str, Any]:
        answer = Response()
        async with aclosing(self._deltas()) as deltas:
            async for delta, _ in deltas:
                answer.extend(delta)
        made = self._run.answers[0]
        calls = [_call(i, call) for i, call in enumerate(made.calls)]
        said = _said(self._kind, made.content, made.reasoning, calls)
        return _head(self._name) | said | self._logprobs(answer) | self._end(answer)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        last, told = Response(), 0
        async with aclosing(self._deltas()) as deltas:
            async for delta, pieces in deltas:
                last, calls = delta, self._run.answers[0].calls
                whole = len(calls) if delta.finish_reason is not None else len(calls) - 1
                ready = [_call(i, calls[i]) for i in range(told, max(whole, told))]
                told += len(ready)
                content, thinking = (
                    "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("content", "reasoning")
                )
                logprobs = self._logprobs(delta)
                if content or thinking or ready or logprobs:
                    said = _said(self._kind, content, thinking, ready)
                    yield _head(self._name) | said | logprobs | {"done": False}
        yield _head(self._name) | _said(self._kind) | self._end(last)

    def _end(self, last: Response) -> dict[str, Any]:
        """Why it ended, and what it took: times in nanoseconds."""
        usage, ended = self._run.usage, perf_counter_ns()
        return {
            "done_reason": "length" if last.finish_reason == "length" else "stop",
            "done": True,
            "total_duration": ended - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_cached_count": usage.cached,
            "prompt_eval_duration": self._first - self._began,
            "eval_count": usage.generated,
            "eval_duration": ended - self._first,
        }
