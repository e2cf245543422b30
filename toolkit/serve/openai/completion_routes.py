"""POST /v1/completions."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.messages import Response
from toolkit.serve.fields.protocol import CompletionRequest
from toolkit.serve.generation.choice import Choice
from toolkit.serve.generation.choices import Usage, run_choices
from toolkit.serve.generation.read import encode_prompt, parse
from toolkit.serve.generation.sampling import choice_config, generation_config
from toolkit.serve.http.openapi.answers import TextCompletion
from toolkit.serve.http.openapi.schema import EVENTS, describe
from toolkit.serve.http.replies import EventReply, JsonReply
from toolkit.serve.openai.best import Best
from toolkit.serve.openai.infill import with_gap
from toolkit.serve.openai.logprobs import CompletionLogprobs, prompt_logprobs
from toolkit.serve.state import ServerState

logger = logging.getLogger("toolkit.serve")
router = APIRouter()
BODIES: list[type[BaseModel]] = [CompletionRequest]
NOTHING: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}


@router.post("/v1/completions", **describe(CompletionRequest, "Continue a text", TextCompletion, stream=EVENTS))
async def completions(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, CompletionRequest)
    state.admit(request, request.token_limit, len(request.prompt))
    answer = CompletionAnswer(state, request)
    return EventReply(answer.chunks()) if request.stream else JsonReply(answer.whole)


class CompletionAnswer:
    """The answer to one completion request, whole or in chunks. Choice ``p * drawn + i`` is choice i of prompt p."""

    def __init__(self, state: ServerState, request: CompletionRequest) -> None:
        self.state = state
        self.request = request
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.score_only = request.token_limit == 0  # echo the prompt with its log-probabilities, generate nothing

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.request.model}

    def _prompt_logprobs(self) -> int | None:
        """How many alternatives of each prompt token are wanted; None = not even its own log-probability."""
        wanted = (self.request.prompt_logprobs, self.request.logprobs if self.request.echo else None)
        return max((count for count in wanted if count is not None), default=None)

    async def _choices(self) -> list[Choice]:
        state, request = self.state, self.request
        n = request.drawn
        chosen_alone = 0 if n > (request.n or 1) else None  # log-probabilities that best_of needs
        config = generation_config(
            state,
            request,
            max_new_tokens=request.token_limit or (1 if self.score_only else None),
            logprobs=chosen_alone if request.logprobs is None else request.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
        )
        if request.echo and request.logprobs is not None and not request.stop:
            # Who adds up log-probabilities (lm-eval) counts on an entry for each token generated, an end token's too.
            config = replace(config, include_stop_str_in_output=True)
        choices, adapter = [], state.adapter_of(request.model)
        common: Any = {"priority": self.state.priority(request.priority), "label": request.session_id}
        common["salt"] = request.cache_salt or ""
        for p, prompt in enumerate(request.prompt):
            param = "prompt" if len(request.prompt) == 1 else f"prompt.{p}"
            if request.suffix:
                prompt = with_gap(state.engine.tokenizer, "suffix", str(prompt), request.suffix)
            special, kept = request.add_special_tokens is not False, request.kept_tokens(state.engine.session_len)
            token_ids = await encode_prompt(state, prompt, param, special, kept)
            for i in range(n):
                told = bool(request.return_progress and not i)
                own = choice_config(config, i)
                choices.append(Choice(p * n + i, p, token_ids, own, adapter, **common, progress=told))
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s: %s", self.id, state.shorten(request.prompt))
        return choices

    async def _parts(
        self, usage: Usage, choices: list[Choice], best: Best | None = None
    ) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """(choice index, {text, logprobs, finish_reason}) in order of arrival; the echoed prompt comes first. ``best``
        is told of every token."""
        request, tokenizer = self.request, self.state.engine.tokenizer
        by_index = {choice.index: choice for choice in choices}
        special = request.skip_special_tokens is False
        logprobs = {i: CompletionLogprobs(tokenizer, request.logprobs or 0, special) for i in by_index}
        begun: set[int] = set()
        async with aclosing(run_choices(self.state, self.id, choices)) as stream:
            async for index, delta in stream:
                if self.score_only:
                    delta = Response(
                        finish_reason="length" if delta.finish_reason else None,
                        cached_tokens=delta.cached_tokens,
                        prompt_logprobs=delta.prompt_logprobs,
                    )
                usage.add(index, delta)
                if delta.prompt_progress is not None:
                    yield index, {**NOTHING, "prompt_progress": vars(delta.prompt_progress)}
                    if not (delta.token_ids or delta.finish_reason):
                        continue
                if delta.cache_block_ids is not None:
                    yield index, {**NOTHING, "cache_block_ids": delta.cache_block_ids}
                if best is not None:
                    best.add(index, delta)
                if index not in begun:
                    begun.add(index)
                    choice = by_index[index]
                    if request.return_token_ids:
                        yield index, {**NOTHING, "prompt_token_ids": choice.token_ids}
                    if request.echo:
                        echo = partial(self._echo, choice, delta, logprobs[index])
                        yield index, await self.state.lanes.run(echo, len(choice.token_ids))
                if request.prompt_logprobs is not None and delta.prompt_logprobs:
                    ids, entries = by_index[index].token_ids, delta.prompt_logprobs
                    tell = partial(prompt_logprobs, tokenizer, ids, entries, request.prompt_logprobs)
                    yield index, {**NOTHING, "prompt_logprobs": await self.state.lanes.run(tell, len(ids))}
                piece = None
                if request.logprobs is not None and delta.token_ids:
                    piece = logprobs[index].piece(delta.token_ids, delta.logprobs or [])
                shown = {"token_ids": delta.token_ids} if request.return_token_ids else {}
                if delta.text or piece or delta.finish_reason or shown:
                    finish = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                    yield index, {"text": delta.text, "logprobs": piece, **finish, **shown}

    def _echo(self, choice: Choice, delta: Response, logprobs: CompletionLogprobs) -> dict[str, Any]:
        prompt = self.request.prompt[choice.prompt]
        skip = self.request.skip_special_tokens is not False
        text = prompt if isinstance(prompt, str) else self.state.engine.tokenizer.decode(prompt, skip)
        piece = None
        if self.request.logprobs is not None:
            piece = logprobs.piece(choice.token_ids, delta.prompt_logprobs or [], text)
        return {**NOTHING, "text": text, "logprobs": piece}

    async def whole(self) -> dict[str, Any]:
        """The text_completion object."""
        async with self.state.slot():
            choices = await self._choices()
            usage, best = Usage(choices), Best(choices)
            rows = [dict(NOTHING) for _ in choices]
            async with aclosing(self._parts(usage, choices, best)) as parts:
                async for index, part in parts:
                    _extend(rows[index], part)
        n = self.request.n or 1
        told = best.of_each_prompt(n) if self.request.drawn > n else range(len(rows))
        chosen = [{"index": i, **rows[index]} for i, index in enumerate(told)]
        return {**self._head(), "choices": chosen, "usage": usage.as_dict()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """text_completion objects with a piece of one choice each; then the usage if asked for."""
        head = self._head()
        if self.request.include_usage:
            head["usage"] = None
        async with self.state.slot():
            choices = await self._choices()
            usage = Usage(choices)
            async with aclosing(self._parts(usage, choices)) as parts:
                async for index, part in parts:
                    progress = {"prompt_progress": told} if (told := part.pop("prompt_progress", None)) else {}
                    yield {**head, "choices": [{"index": index, **part}], **progress}
        if self.request.include_usage:
            yield {**head, "choices": [], "usage": usage.as_dict()}


def _extend(row: dict[str, Any], part: dict[str, Any]) -> None:
    """Append a piece of a choice to its ``row``."""
    row["text"] += part["text"]
    row |= {name: part[name] for name in ("prompt_logprobs", "prompt_token_ids", "cache_block_ids") if name in part}
    if "token_ids" in part:
        row.setdefault("token_ids", []).extend(part["token_ids"])
    row["finish_reason"], row["stop_reason"] = part["finish_reason"], part["stop_reason"]
    if part["logprobs"] is None:
        return
    if row["logprobs"] is None:
        row["logprobs"] = part["logprobs"]
    else:
        for key, values in part["logprobs"].items():
            row["logprobs"][key] += values
