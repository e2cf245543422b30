"""What routes answer, for /openapi.json alone: answers are written by their routes, not by these classes.

``scripts/fuzz_api`` and ``tests/serve/test_openapi.py`` compare what a server sends with them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Finish = Literal["stop", "length", "tool_calls"]


class Fault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's envelope of an error."""

    error: Fault


class AnthropicFault(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(BaseModel):
    """Anthropic's envelope of an error."""

    type: Literal["error"]
    error: AnthropicFault


class ModelCard(BaseModel):
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


class ModelList(BaseModel):
    """OpenAI's fields, and Anthropic's of a page: it is the only one."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Health(BaseModel):
    status: Literal["healthy", "sleeping", "unhealthy", "shutting down"]
    reason: str | None = None
    restarting: bool | None = None


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, int] | None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    routed_experts: list[list[list[int]]] | None = None


class ChatCompletion(BaseModel):
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


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    cache_block_ids: list[str] | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class StoredResponse(BaseModel):
    """OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class FileCard(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchFault(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchFaults(BaseModel):
    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchCard(BaseModel):
    """OpenAI's batch; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountedTokens(BaseModel):
    input_tokens: int


class CountedInput(CountedTokens):
    object: Literal["response.input_tokens"]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int] | list[dict[str, Any]]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str
    content: str


class Encoded(BaseModel):
    input_ids: list[int] | list[list[int]]
    length: int | list[int]


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class Ranking(BaseModel):
    id: str
    object: Literal["rerank"]
    model: str
    results: list[Ranked]
    usage: Usage


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class CrossEntropy(BaseModel):
    ppl: float


class InteractiveAnswer(BaseModel):
    text: str
    tokens: int
    input_tokens: int
    history_tokens: int
    finish_reason: str | None


class Aborted(BaseModel):
    aborted: int


class Ending(BaseModel):
    status: Literal["shutting down"]


class Sleeping(BaseModel):
    is_sleeping: bool


class Updated(BaseModel):
    """``tensors``: that have come so far, of weights that are ``updated`` once all have."""

    updated: bool
    tensors: int


class EngineInfo(BaseModel):
    """``address``: where blocks are lent, "" = in this machine's memory alone; ``endpoint_info``: what another engine
    is to be told by p2p_connect; ``in_common``: what both must have alike."""

    engine_id: str
    role: Literal["Prefill", "Decode"]
    address: str
    tls: bool
    in_common: dict[str, str]
    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    dp_rank: int
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    endpoint_info: str


class Initialized(BaseModel):
    """As LMDeploy has it; 1 is success."""

    status: int
    engine_endpoint_info: dict[str, str]
    kvtransfer_endpoint_info: list[dict[str, Any]]


class Connected(BaseModel):
    """``status``: 1 where the blocks of that engine can be used here, 2 where not; ``message``: why."""

    status: int
    message: str


class Freed(BaseModel):
    freed: int


class AdapterChanged(BaseModel):
    """``loaded``: the adapter that has come, null where one has gone; ``adapters``: those there are now."""

    loaded: str | None
    adapters: list[str]


class OllamaErrorAnswer(BaseModel):
    """Ollama's envelope of an error."""

    error: str


class OllamaVersion(BaseModel):
    version: str


class OllamaModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: dict[str, Any]
    modified_at: str | None = None
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaShown(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEnd(BaseModel):
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


class OllamaEmbeddings(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(BaseModel):
    embedding: list[float]


class LlamaAnswer(BaseModel):
    """llama.cpp's answer to /completion and /infill."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: dict[str, float]
    completion_probabilities: list[dict[str, Any]] | None = None


class LlamaProps(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class LlamaSlot(BaseModel):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class LlamaPrompt(BaseModel):
    prompt: str
