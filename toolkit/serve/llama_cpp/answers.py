"""What llama.cpp's API answers, for /openapi.json alone (``toolkit.serve.http.openapi.answers``)."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.serve.http.openapi.answer import Answer


class LlamaAnswer(Answer):
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


class LlamaProps(Answer):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class LlamaSlot(Answer):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class LlamaPrompt(Answer):
    prompt: str
