"""OpenAPI: our own code reads bodies and writes answers (limits, one-line errors), so both are described here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from toolkit.serve.http.openapi.answer import Answer
from toolkit.serve.http.openapi.answers import AnthropicErrorAnswer, ErrorAnswer, OllamaErrorAnswer

REF = "#/components/schemas/{model}"
EVENTS = "text/event-stream"  # the media type of most streams
Responses = dict[int | str, dict[str, Any]]

# What a request may be answered with besides 200; docs/server.md says the same.
STATUSES = {
    400: "A field is wrong, or a limit is passed",
    401: "No known API key",
    404: "Unknown model, route or thing",
    408: "The request did not arrive in time",
    413: "The body is too large",
    415: "The body is packed (Content-Encoding)",
    429: "Too many requests wait; Retry-After says when to ask again",
    499: "The request was ended by somebody else",
    500: "The engine failed on this request",
    503: "The server cannot take requests now; Retry-After says when to ask again",
}
FORBIDDEN = {403: "The server was started without the option that allows it"}
BUSY_FILE = {409: "A batch that runs needs the file, or the batch has ended already"}
BUSY = {409: "This conversation is being answered"}
FORGOTTEN = {410: "This conversation is no longer kept: said once, then a new one begins"}

_TALK = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
# What /docs proposes to send, by the name of the body.
EXAMPLES: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": _TALK,
    "CompletionRequest": {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8},
    "ResponsesRequest": {"model": "demo", "input": "Hello", "max_output_tokens": 8},
    "MessagesRequest": _TALK,
    "CountRequest": {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
    "TokenizeRequest": {"prompt": "Hello"},
    "DetokenizeRequest": {"tokens": [72, 101]},
    "EncodeRequest": {"input": ["Hello", "you"]},
    "EmbeddingsRequest": {"model": "demo", "input": ["Hello", "you"]},
    "RerankRequest": {"model": "demo", "query": "fruit", "documents": ["apple", "train"]},
    "ScoreRequest": {"model": "demo", "text_1": "fruit", "text_2": ["apple", "train"]},
    "RawRequest": {"prompt": "Once upon a time", "max_tokens": 8},
    "BatchRequest": {
        "input_file_id": "file-0123456789abcdef01234567",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "PerplexityRequest": {"input": "Once upon a time"},
    "GenerateRequest": {"prompt": "Hello", "session_id": 1, "interactive_mode": True, "request_output_len": 8},
    "AbortRequest": {"abort_all": True},
    "ChatRequest": {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 8}},
    "OllamaGenerateRequest": {"model": "demo", "prompt": "Hello", "stream": False, "options": {"num_predict": 8}},
    "EmbedRequest": {"model": "demo", "input": ["Hello", "you"]},
    "OldEmbedRequest": {"model": "demo", "prompt": "Hello"},
    "ShowRequest": {"model": "demo"},
    "LlamaRequest": {"prompt": "Once upon a time", "n_predict": 8},
    "InfillRequest": {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 8},
    "TemplateRequest": {"messages": [{"role": "user", "content": "Hello"}]},
}


def _shown(model: type[BaseModel]) -> dict[str, Any]:
    """An answer's content, by its name: FastAPI, given the model itself, would make what checks its values, for each
    status of each route, and no answer is checked."""
    one = next(iter(get_args(model)), model)  # of a list
    ref = {"$ref": REF.format(model=one.__name__)}
    return {"application/json": {"schema": ref if one is model else {"type": "array", "items": ref}}}


def _told(statuses: dict[int, str], envelope: type[BaseModel]) -> Responses:
    return {status: {"content": _shown(envelope), "description": text} for status, text in statuses.items()}


ERRORS = _told(STATUSES, ErrorAnswer)
ANTHROPIC_ERRORS = _told(STATUSES, AnthropicErrorAnswer)
OLLAMA_ERRORS = _told(STATUSES, OllamaErrorAnswer)


def answered(
    summary: str, answer: type[BaseModel] | None, *, stream: str | None = None, also: dict[int, str] | None = None
) -> dict[str, Any]:
    """Arguments of a route that answers with ``answer``, or where asked with a stream of this media type; ``also``:
    statuses that are its own."""
    whole: dict[str, Any] = {"description": "The answer", "content": {} if answer is None else _shown(answer)}
    if stream is not None:
        whole["content"][stream] = {"schema": {"description": "Pieces of the answer, one after the other"}}
    return {"summary": summary, "response_model": None, "responses": {200: whole, **_told(also or {}, ErrorAnswer)}}


def describe(
    body: type[BaseModel],
    summary: str,
    answer: type[BaseModel] | None = None,
    *,
    stream: str | None = None,
    also: dict[int, str] | None = None,
) -> dict[str, Any]:
    """As ``answered``, for a route whose JSON body is ``body``."""
    shown = {"example": EXAMPLES[body.__name__]} if body.__name__ in EXAMPLES else {}
    content = {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}, **shown}}
    return answered(summary, answer, stream=stream, also=also) | {
        "openapi_extra": {"requestBody": {"required": True, "content": content}}
    }


def add_schemas(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Make ``app.openapi()`` define ``models``, those of bodies, those of answers and everything they refer to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        operations = [operation for path in document["paths"].values() for operation in path.values()]
        for operation in operations:
            operation["responses"].pop("422", None)  # FastAPI's own refusal, which no route here gives
        _, answers = models_json_schema([(m, "serialization") for m in _answers(operations)], ref_template=REF)
        _, bodies = models_json_schema([(m, "validation") for m in models], ref_template=REF)
        schemas.update(answers.get("$defs", {}) | bodies["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _answers(operations: Iterable[dict[str, Any]]) -> list[type[Answer]]:
    """What they answer with."""
    known = {kind.__name__: kind for kind in _kinds(Answer)}
    schemas = [
        content["schema"].get("items", content["schema"]).get("$ref", "")
        for operation in operations
        for response in operation["responses"].values()
        for content in response.get("content", {}).values()
    ]
    return [known[name] for ref in dict.fromkeys(schemas) if (name := ref.rpartition("/")[2]) in known]


def _kinds(base: type[Answer]) -> Iterator[type[Answer]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
