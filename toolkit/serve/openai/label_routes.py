"""What a model's own classifier says of texts: /classify as vLLM has it, /pooling as LMDeploy has it for rewards."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response as HttpResponse

from toolkit.serve.fields.message import Messages
from toolkit.serve.fields.protocol import Prompts
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.generation.pooling import POOLED, run_prompts, usage
from toolkit.serve.generation.read import (
    check_prompt,
    encode_embedded,
    encode_text,
    most_tokens,
    parse,
    refuse_pictures,
)
from toolkit.serve.http.errors import bad_field
from toolkit.serve.http.openapi.answers import Classes, Rewards
from toolkit.serve.http.openapi.schema import describe
from toolkit.serve.http.replies import JsonReply
from toolkit.serve.openai.pooling_routes import TRUNCATE
from toolkit.serve.state import ServerState

router = APIRouter()


class LabelRequest(Strict):
    """Texts, or one conversation, which goes through the chat template."""

    model: ModelName = ""
    input: Prompts | None = None
    messages: Messages | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=1 << 20, description=TRUNCATE)
    user: str | None = Field(None, description="Without effect")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("expected either input or messages")
        return self

    @property
    def count(self) -> int:
        return 1 if self.input is None else len(self.input)


class ClassifyRequest(LabelRequest):
    use_activation: bool | None = Field(None, description="Probabilities in place of logits; default true")


class PoolingRequest(LabelRequest):
    pass


BODIES: list[type[BaseModel]] = [ClassifyRequest, PoolingRequest]


@router.post("/classify", **describe(ClassifyRequest, "How likely each label of a classifier is", Classes))
async def classify(raw: Request) -> HttpResponse:
    state, request, size = await parse(raw, ClassifyRequest)
    _check(state, request)
    return JsonReply(partial(_classify, state, request, size))


async def _classify(state: ServerState, request: ClassifyRequest, size: int) -> dict[str, Any]:
    head, name = state.head, f"classify-{uuid.uuid4().hex}"
    numbers = head.logits if request.use_activation is False else head.probabilities
    found, spent = await _read(state, request, name, size, numbers)
    data = [
        {"index": i, "label": head.labels[int(np.argmax(row))], "probs": row.tolist(), "num_classes": len(row)}
        for i, row in enumerate(found)
    ]
    return _told(name, request.model, data, spent)


@router.post("/pooling", **describe(PoolingRequest, "The reward of each text, as LMDeploy has it", Rewards))
async def pooling(raw: Request) -> HttpResponse:
    state, request, size = await parse(raw, PoolingRequest)
    _check(state, request)
    return JsonReply(partial(_pooling, state, request, size))


async def _pooling(state: ServerState, request: PoolingRequest, size: int) -> dict[str, Any]:
    name = f"pool-{uuid.uuid4().hex}"
    found, spent = await _read(state, request, name, size, state.head.logits)
    data = [
        {"index": i, "object": "pooling", "data": float(row[0]) if len(row) == 1 else row.tolist()}
        for i, row in enumerate(found)
    ]
    return _told(name, request.model, data, spent)


def _check(state: ServerState, request: LabelRequest) -> None:
    state.check_ready(request.model)
    if not state.head.scores:
        raise bad_field("model", "this one has no classifier (…ForSequenceClassification); vectors: /v1/embeddings")
    state.settings.limits.check_prompts("input", request.count)


async def _read(
    state: ServerState,
    request: LabelRequest,
    name: str,
    size: int,
    numbers: Callable[[NDArray[np.float32]], NDArray[np.float64]],
) -> tuple[list[NDArray[np.float64]], dict[str, Any]]:
    """What ``numbers`` makes of the state by which each text is judged, and token counts."""
    head, most = state.head, request.truncate_prompt_tokens
    cut = None if most is None else most_tokens(state, most)

    async def encode(i: int) -> list[int]:
        if request.input is None:
            param, ids = "messages", await _talk(state, request, size)
        else:
            param = f"input.{i}" if request.count > 1 else "input"
            ids = await encode_embedded(state, request.input[i], param, most)
        ended = head.ended(ids, cut)
        check_prompt(state, len(ended), param)
        return ended

    async with state.slot():
        adapter = state.adapter_of(request.model)
        answers = await run_prompts(state, name, request.count, encode, POOLED, adapter, head.spec.pooling)
    return [numbers(answer.last_hidden_state[0]) for answer in answers], usage(answers)


async def _talk(state: ServerState, request: LabelRequest, size: int) -> list[int]:
    messages = [message.for_template() for message in request.messages or ()]
    refuse_pictures(messages, "messages", "a classifier reads text alone; leave the images out")
    template = state.template_of(request.model)
    return await encode_text(state, lambda: template.render(messages, add_generation_prompt=False), "messages", size)


def _told(name: str, model: str, data: list[dict[str, Any]], spent: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "list", "created": int(time.time()), "model": model, "data": data, "usage": spent}
