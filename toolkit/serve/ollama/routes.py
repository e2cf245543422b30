"""POST /api/chat, /api/generate, /api/embed and /api/show, as Ollama has them; its lists are in ``cards``."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.plain import Plain
from toolkit.serve.generation.pooling import as_numbers, embed
from toolkit.serve.generation.read import encode_embedded, parse, translated
from toolkit.serve.http.errors import ApiError, not_served
from toolkit.serve.http.openapi.schema import OLLAMA_ERRORS, describe
from toolkit.serve.http.replies import EventReply, JsonReply, Wire, json_response, line
from toolkit.serve.ollama.answers import OllamaChat, OllamaEmbedding, OllamaEmbeddings, OllamaShown, OllamaText
from toolkit.serve.ollama.asked import bare_prompt, chat_request, prompt_in_chat
from toolkit.serve.ollama.cards import Abilities, Listed, shown
from toolkit.serve.ollama.fields import (
    Answering,
    ChatRequest,
    EmbedRequest,
    OldEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
    served_as,
)
from toolkit.serve.ollama.told import Kind, Told, loaded
from toolkit.serve.openai.infill import with_gap
from toolkit.serve.state import ServerState

router = APIRouter(responses=OLLAMA_ERRORS)
BODIES: list[type[BaseModel]] = [ChatRequest, OllamaGenerateRequest, EmbedRequest, OldEmbedRequest, ShowRequest]
MEDIA = "application/x-ndjson"
WIRE = Wire(line, ApiError.ollama, media=MEDIA.encode())


def of_one(state: ServerState) -> list[Listed]:
    """What a server of one model tells of it, by each of its names."""
    engine = state.engine
    memory = None if state.sleeping else engine.plan.total
    return [Listed(name, memory, engine.session_len, engine.tokenizer.path) for name in state.model_names]


@router.post("/api/chat", **describe(ChatRequest, "Answer a conversation, as Ollama has it", OllamaChat, stream=MEDIA))
async def chat(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, ChatRequest)
    model = served_as(asked.model, state.model_names)
    if not asked.messages:
        return _present(state, "chat", asked, model)
    request = await translated(state, lambda: chat_request(asked, model), size)
    return _answer(state, "chat", asked, Chat(state, request, size, f"ollama-{uuid.uuid4().hex}"))


@router.post(
    "/api/generate", **describe(OllamaGenerateRequest, "Answer a prompt, as Ollama has it", OllamaText, stream=MEDIA)
)
async def generate(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, OllamaGenerateRequest)
    model, name = served_as(asked.model, state.model_names), f"ollama-{uuid.uuid4().hex}"
    if not asked.prompt and not asked.images:
        return _present(state, "generate", asked, model)
    if not asked.raw and not asked.suffix:
        request = await translated(state, lambda: prompt_in_chat(asked, model), size)
        return _answer(state, "generate", asked, Chat(state, request, size, name))
    prompt = asked.prompt or ""
    if asked.suffix:
        prompt = with_gap(state.engine.tokenizer, "suffix", prompt, asked.suffix)
    bare = await translated(state, lambda: bare_prompt(asked, model, prompt), size)
    return _answer(state, "generate", asked, Plain(state, bare, name))


def _present(state: ServerState, kind: Kind, asked: Answering, model: str) -> HttpResponse:
    """To a request that would have Ollama load the model."""
    state.check_ready(model, waits=False)
    return json_response(loaded(kind, asked.model))


def _answer(state: ServerState, kind: Kind, asked: Answering, run: Chat | Plain) -> HttpResponse:
    state.admit(run.request, run.request.token_limit)
    told = Told(kind, run, asked.model, (asked.top_logprobs or 0) if asked.logprobs else None)
    return JsonReply(told.whole, WIRE) if asked.stream is False else EventReply(told.chunks(), WIRE)


@router.post("/api/embed", **describe(EmbedRequest, "A vector for each text, as Ollama has it", OllamaEmbeddings))
async def embeddings(raw: Request) -> HttpResponse:
    state, asked, _ = await parse(raw, EmbedRequest)

    async def answer() -> dict[str, Any]:
        began = perf_counter_ns()
        told, spent = await _vectors(state, asked.model, asked.input, asked.truncate is not False, asked.dimensions)
        took = {"total_duration": perf_counter_ns() - began, "load_duration": 0}
        return {"model": asked.model, "embeddings": told, **took, "prompt_eval_count": spent["prompt_tokens"]}

    return _pooled(state, asked.model, len(asked.input), answer)


@router.post(
    "/api/embeddings", **describe(OldEmbedRequest, "A vector for a text, as Ollama had it before", OllamaEmbedding)
)
async def old_embeddings(raw: Request) -> HttpResponse:
    state, asked, _ = await parse(raw, OldEmbedRequest)

    async def answer() -> dict[str, Any]:
        told, _ = await _vectors(state, asked.model, [asked.prompt], True, None)
        return {"embedding": told[0]}

    return _pooled(state, asked.model, 1, answer)


def _pooled(state: ServerState, model: str, texts: int, answer: Callable[[], Awaitable[Any]]) -> HttpResponse:
    state.check_ready(served_as(model, state.model_names))
    state.settings.limits.check_prompts("input", texts)
    return JsonReply(answer, WIRE)


async def _vectors(
    state: ServerState, model: str, texts: list[str], cut: bool, dimensions: int | None
) -> tuple[list[Any], dict[str, Any]]:
    """The vectors of ``texts``, and the token counts; ``cut``: those that do not fit are, else they are refused."""

    async def encode(i: int) -> list[int]:
        return await encode_embedded(state, texts[i], f"input.{i}" if len(texts) > 1 else "input", -1 if cut else None)

    adapter = state.adapter_of(served_as(model, state.model_names))
    name = f"ollama-{uuid.uuid4().hex}"
    write = partial(state.head.embedding, dimensions=dimensions, normalize=True)
    return await embed(state, name, len(texts), encode, adapter, lambda row: as_numbers(write(row)))


@router.post("/api/show", **describe(ShowRequest, "What a model is, as Ollama tells it", OllamaShown))
async def show(raw: Request) -> HttpResponse:
    state, asked, _ = await parse(raw, ShowRequest)
    name = served_as(asked.model or asked.name or state.model_name, state.model_names)
    listed = next((one for one in of_one(state) if one.name == name), None)
    if listed is None:
        raise not_served(name, state.model_names)
    can = Abilities(
        state.engine.tokenizer, state.template.source, state.formats, state.head.told, state.eyes is not None
    )
    return json_response(await state.lanes.run(lambda: shown(listed, can), 0))
