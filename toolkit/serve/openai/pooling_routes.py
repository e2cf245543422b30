"""Texts as numbers: /v1/embeddings as OpenAI has it, /v1/rerank and /v1/score as vLLM has them."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field
from starlette.responses import Response as HttpResponse

from toolkit.serve.fields.protocol import Prompts, Texts
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.generation.pooling import Pairs, as_base64, as_numbers, embed
from toolkit.serve.generation.read import encode_embedded, parse
from toolkit.serve.http.errors import bad_field
from toolkit.serve.http.openapi.answers import Embeddings, Ranking, Scores
from toolkit.serve.http.openapi.schema import describe
from toolkit.serve.http.replies import JsonReply
from toolkit.serve.state import ServerState

router = APIRouter()
TRUNCATE = "Cut texts that are longer to so many tokens (of a pair the document); -1: to what the model reads"
Method = Literal["classifier", "embedding", "yes_no"]


class EmbeddingsRequest(Strict):
    model: ModelName = ""
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=1 << 20, description="Keep so many of the first")
    normalize: bool | None = Field(None, description="To length 1; default true")
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=1 << 20, description=TRUNCATE)
    user: str | None = Field(None, description="Without effect")


def _text_of(document: Any) -> Any:
    return document["text"] if isinstance(document, dict) and set(document) == {"text"} else document


Document = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | dict[Literal["text"], str])]


class PairRequest(Strict):
    """What /v1/rerank and /v1/score share."""

    model: ModelName = ""
    instruction: str | None = Field(None, description="What a document has to be, told to a model that says yes or no")
    method: Method | None = Field(
        None,
        description="classifier: what the model's own head says; embedding: the cosine of the two texts' vectors; "
        "yes_no: how likely the model answers yes. Default: the first that the model was made for",
    )
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=1 << 20, description=TRUNCATE)
    user: str | None = Field(None, description="Without effect")


class RerankRequest(PairRequest):
    query: str
    documents: list[Document] = Field(min_length=1)
    top_n: int | None = Field(None, ge=0, description="How many of the best come back; 0 = all")
    return_documents: bool | None = Field(None, description="Default: true")


class ScoreRequest(PairRequest):
    """Two texts, one and several, or as many of both."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents"))


BODIES: list[type[BaseModel]] = [EmbeddingsRequest, RerankRequest, ScoreRequest]


@router.post("/v1/embeddings", **describe(EmbeddingsRequest, "A vector for each text", Embeddings))
async def embeddings(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, EmbeddingsRequest)
    state.check_ready(request.model)
    state.settings.limits.check_prompts("input", len(request.input))
    return JsonReply(partial(_embeddings, state, request))


async def _embeddings(state: ServerState, request: EmbeddingsRequest) -> dict[str, Any]:
    async def encode(i: int) -> list[int]:
        param = f"input.{i}" if len(request.input) > 1 else "input"
        return await encode_embedded(state, request.input[i], param, request.truncate_prompt_tokens)

    write = as_base64 if request.encoding_format == "base64" else as_numbers
    told, spent = await embed(
        state,
        f"embd-{uuid.uuid4().hex}",
        len(request.input),
        encode,
        state.adapter_of(request.model),
        lambda row: write(state.head.embedding(row, request.dimensions, request.normalize is not False)),
    )
    data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(told)]
    return {"object": "list", "data": data, "model": request.model, "usage": spent}


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post(
    "/v1/rerank", **describe(RerankRequest, "Documents in the order of what they have to do with a query", Ranking)
)
async def rerank(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, RerankRequest)
    state.check_ready(request.model)
    state.settings.limits.check_prompts("documents", len(request.documents))
    return JsonReply(partial(_rerank, state, request))


async def _rerank(state: ServerState, request: RerankRequest) -> dict[str, Any]:
    name, texts = f"rerank-{uuid.uuid4().hex}", request.documents
    pairs = Pairs(
        state, name, [request.query], texts, ("query", "documents"), request.instruction, request.truncate_prompt_tokens
    )
    scores, spent = await pairs.scores(request.method, state.adapter_of(request.model))
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.top_n or len(texts)]
    shown = request.return_documents is not False
    results = [
        {"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if shown else {})} for i in order
    ]
    return {"id": name, "object": "rerank", "model": request.model, "results": results, "usage": spent}


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", **describe(ScoreRequest, "How much two texts have to do with each other", Scores))
async def score(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, ScoreRequest)
    state.check_ready(request.model)
    first, second = len(request.text_1), len(request.text_2)
    if first not in (1, second):
        raise bad_field("text_1", f"expected one text, or {second} as text_2 has, found {first}")
    state.settings.limits.check_prompts("text_2", second)
    return JsonReply(partial(_score, state, request))


async def _score(state: ServerState, request: ScoreRequest) -> dict[str, Any]:
    name = f"score-{uuid.uuid4().hex}"
    pairs = Pairs(
        state,
        name,
        request.text_1,
        request.text_2,
        ("text_1", "text_2"),
        request.instruction,
        request.truncate_prompt_tokens,
    )
    scores, spent = await pairs.scores(request.method, state.adapter_of(request.model))
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    head = {"id": name, "object": "list", "created": int(time.time()), "model": request.model}
    return {**head, "data": data, "usage": spent}
