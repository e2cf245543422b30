"""LMDeploy's own endpoints: POST /generate, tokens in and out without a chat template, and POST /get_ppl."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response as HttpResponse

from toolkit.messages import GenerationConfig, Response
from toolkit.serve.fields.protocol import SampledRequest, TokenId
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.generation.choice import Choice
from toolkit.serve.generation.choices import run_choices
from toolkit.serve.generation.likeliest import likeliest, number
from toolkit.serve.generation.pooling import run_prompts
from toolkit.serve.generation.read import encode_prompt, parse
from toolkit.serve.generation.sampling import generation_config
from toolkit.serve.http.errors import bad_field
from toolkit.serve.http.openapi.schema import EVENTS, describe
from toolkit.serve.http.replies import EventReply, JsonReply
from toolkit.serve.lmdeploy.answers import CrossEntropy, Generated
from toolkit.serve.state import ServerState

router = APIRouter()


class RawRequest(SampledRequest):
    """A text or token ids to continue."""

    prompt: str | None = None
    input_ids: list[TokenId] | None = None
    max_tokens: int | None = Field(None, ge=0, le=1 << 30, description="Default: 128; 0: score the prompt alone")
    return_logprob: bool | None = None
    top_logprobs_num: int | None = Field(None, ge=0, le=20, description="Of each token the likeliest ones, too")
    logprob_start_len: int | None = Field(
        None, ge=-1, le=1 << 30, description="Log-probabilities of the prompt's tokens from this one on; -1: of none"
    )
    return_routed_experts: bool | None = Field(
        None, description="As LMDeploy has it: which experts each token went to, of models that have such"
    )
    image_data: None = None

    @model_validator(mode="after")
    def _fits(self) -> RawRequest:
        if (self.prompt is None) == (self.input_ids is None):
            raise ValueError("prompt: expected either it or input_ids")
        if self.n not in (None, 1):
            raise ValueError("n: expected 1 here; /v1/completions gives several")
        if not self.return_logprob and (self.top_logprobs_num or self.prompt_from is not None):
            raise ValueError("return_logprob: expected true beside top_logprobs_num and logprob_start_len")
        if self.max_tokens == 0 and self.prompt_from is None:
            raise ValueError("max_tokens: 0 needs return_logprob and logprob_start_len, or there is nothing to return")
        return self

    @property
    def prompt_from(self) -> int | None:
        """The first prompt token whose log-probability is wanted."""
        start = self.logprob_start_len
        return None if start is None or start < 0 else start


class PerplexityRequest(Strict):
    model: ModelName = ""
    input: str | list[TokenId]


BODIES: list[type[BaseModel]] = [RawRequest, PerplexityRequest]


@router.post(
    "/generate",
    **describe(RawRequest, "Continue a text or token ids, as LMDeploy's /generate does", Generated, stream=EVENTS),
)
async def generate(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, RawRequest)
    state.admit(request, request.max_tokens)
    answer = RawAnswer(state, request)
    return EventReply(answer.chunks()) if request.stream else JsonReply(answer.whole)


class RawAnswer:
    """The answer to one request, whole or in pieces."""

    def __init__(self, state: ServerState, request: RawRequest) -> None:
        self.state = state
        self.request = request
        self.id = f"gen-{uuid.uuid4().hex}"

    async def _deltas(self) -> AsyncGenerator[tuple[list[int], Response], None]:
        """(the prompt, what is new of the answer)."""
        state, request = self.state, self.request
        top = request.top_logprobs_num or 0
        config = generation_config(
            state,
            request,
            max_new_tokens=128 if request.max_tokens is None else request.max_tokens or 1,
            logprobs=top if request.return_logprob else None,
            prompt_logprobs=None if request.prompt_from is None else top,
            routed=request.return_routed_experts,
        )
        prompt: str | list[int] = request.prompt if request.input_ids is None else request.input_ids  # type: ignore
        async with state.slot():
            ids = await encode_prompt(state, prompt, "prompt" if request.input_ids is None else "input_ids")
            model = request.model
            choice = Choice(
                0,
                0,
                ids,
                config,
                state.adapter_of(model),
                only="score" if request.max_tokens == 0 else None,
                priority=state.priority(request.priority),
                label=request.session_id,
                salt=request.cache_salt or "",
            )
            async with aclosing(run_choices(state, self.id, [choice])) as stream:
                async for _, delta in stream:
                    yield ids, delta

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        routed = Response()
        async with aclosing(self._deltas()) as deltas:
            async for ids, delta in deltas:
                routed.extend(Response(routed_experts=delta.routed_experts))
                delta.routed_experts = routed.routed_experts if delta.finish_reason else None
                yield self._told(ids, delta)

    async def whole(self) -> dict[str, Any]:
        answer, ids = Response(), list[int]()
        async with aclosing(self._deltas()) as deltas:
            async for prompt, delta in deltas:
                ids = prompt
                answer.extend(delta)
        return await self.state.lanes.run(partial(self._told, ids, answer), len(ids))

    def _told(self, ids: list[int], answer: Response) -> dict[str, Any]:
        reason = answer.finish_reason
        meta: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": answer.input_token_len,
            "completion_tokens": answer.generate_token_len,
            "cached_tokens": answer.cached_tokens,
            "finish_reason": reason and {"type": reason},
        }
        if self.request.return_logprob:
            top = self.request.top_logprobs_num or 0
            meta |= _logprobs("output", answer.token_ids, answer.logprobs or [], top)
            if (start := self.request.prompt_from) is not None and answer.prompt_logprobs:
                meta |= _logprobs("input", ids[start:], answer.prompt_logprobs[start:], top)
        if answer.routed_experts is not None:
            meta["routed_experts"] = answer.routed_experts.tolist()
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def _logprobs(kind: str, ids: list[int], found: list[Any], top: int) -> dict[str, Any]:
    """``kind``_token_logprobs as (log-probability, id) of each token, None where it has none; and the best ``top``."""
    pairs = [(number(entry[token]) if entry else None, token) for token, entry in zip(ids, found, strict=False)]
    told: dict[str, Any] = {f"{kind}_token_logprobs": pairs}
    if top:
        told[f"{kind}_top_logprobs"] = [
            entry and [(number(value), token) for token, value in likeliest(entry, top)] for entry in found
        ]
    return told


@router.post(
    "/get_ppl", **describe(PerplexityRequest, "Mean cross-entropy of a text, as LMDeploy has it", CrossEntropy)
)
async def get_ppl(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, PerplexityRequest)
    model = request.model
    state.check_ready(model)

    async def encode(i: int) -> list[int]:
        ids = await encode_prompt(state, request.input, "input")
        if len(ids) < 2:
            raise bad_field("input", f"expected at least two tokens, found {len(ids)}")
        return ids

    async def answer() -> dict[str, Any]:
        name, config = f"ppl-{uuid.uuid4().hex}", GenerationConfig(max_new_tokens=1, prompt_logprobs=0)
        async with state.slot():
            (found,) = await run_prompts(state, name, 1, encode, config, state.adapter_of(model), "score")
        values = [next(iter(entry.values())) for entry in found.prompt_logprobs or () if entry]
        return {"ppl": -float(np.mean(values))}

    return JsonReply(answer)
