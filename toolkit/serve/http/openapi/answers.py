"""What routes answer, for /openapi.json alone: answers are written by their routes, not by these classes.

``scripts/fuzzing/fuzz_api`` and ``tests/serve/test_openapi.py`` compare what a server sends with them.
"""

from __future__ import annotations

from typing import Any, Literal

from toolkit.serve.http.openapi.answer import Answer

Finish = Literal["stop", "length", "tool_calls"]


class Fault(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """OpenAI's envelope of an error."""

    error: Fault


class AnthropicFault(Answer):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(Answer):
    """Anthropic's envelope of an error."""

    type: Literal["error"]
    error: AnthropicFault


class ModelCard(Answer):
    """OpenAI's fields, Anthropic's, and vLLM's ``max_model_len`` and ``parent``."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_model_len: int | None = None
    parent: str | None = None


class Page(Answer):
    """A part of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelList(Page):
    """OpenAI's fields, and Anthropic's of a page: it is the only one."""

    data: list[ModelCard]
    has_more: Literal[False]


class Health(Answer):
    status: Literal["healthy", "sleeping", "unhealthy", "shutting down"]
    reason: str | None = None
    restarting: bool | None = None


class Usage(Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, int] | None = None


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    routed_experts: list[list[list[int]]] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    cache_block_ids: list[str] | None = None
    remote_token_ids: list[int] | None = None


class TextChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    cache_block_ids: list[str] | None = None


class TextCompletion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class StoredResponse(Answer):
    """OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Page):
    data: list[dict[str, Any]]


class AnthropicMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountedTokens(Answer):
    input_tokens: int


class CountedInput(CountedTokens):
    object: Literal["response.input_tokens"]


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int] | list[dict[str, Any]]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str
    content: str


class Encoded(Answer):
    input_ids: list[int] | list[list[int]]
    length: int | list[int]


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Ranked(Answer):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class Ranking(Answer):
    id: str
    object: Literal["rerank"]
    model: str
    results: list[Ranked]
    usage: Usage


class Score(Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Class(Answer):
    """``label``: the likeliest; ``probs``: of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: Usage


class Reward(Answer):
    """``data``: the reward, or a number for each label of several."""

    index: int
    object: Literal["pooling"]
    data: float | list[float]


class Rewards(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Reward]
    usage: Usage


class Aborted(Answer):
    aborted: int


class Ending(Answer):
    status: Literal["shutting down"]


class Sleeping(Answer):
    is_sleeping: bool


class Updated(Answer):
    """``tensors``: that have come so far, of weights that are ``updated`` once all have."""

    updated: bool
    tensors: int


class AdapterChanged(Answer):
    """``loaded``: the adapter that has come, null where one has gone; ``adapters``: those there are now."""

    loaded: str | None
    adapters: list[str]


class OllamaErrorAnswer(Answer):
    """Ollama's envelope of an error."""

    error: str
