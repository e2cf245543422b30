"""What Ollama's API answers, for /openapi.json alone (``toolkit.serve.http.openapi.answers``)."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.serve.http.openapi.answer import Answer


class OllamaVersion(Answer):
    version: str


class OllamaModel(Answer):
    name: str
    model: str
    size: int
    digest: str
    details: dict[str, Any]
    modified_at: str | None = None
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaShown(Answer):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEnd(Answer):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_cached_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaChat(OllamaEnd):
    message: dict[str, Any]


class OllamaText(OllamaEnd):
    response: str
    thinking: str | None = None


class OllamaEmbeddings(Answer):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Answer):
    embedding: list[float]
