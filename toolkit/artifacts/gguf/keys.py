"""Typed access to the metadata of a GGUF file, and what kind of value a key must have that is not read through it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

TEMPLATE = "tokenizer.chat_template"  # of the usual one; TEMPLATE.NAME: of another, as "tool_use"
NEVER = "tokenizer.ggml.suppress_tokens"  # ids of tokens that are never drawn (Gemma 4)
_TEXT, _TEXTS, _NUMBERS, _WHOLE, _TRUTH = (
    "text",
    "a list of texts",
    "a list of numbers",
    "a whole number",
    "true or false",
)
_TYPES: dict[str, tuple[type, ...]] = {
    _TEXT: (str,), _TEXTS: (list,), _NUMBERS: (np.ndarray,), _WHOLE: (int,), _TRUTH: (bool, int),
}  # fmt: skip
_KINDS = {
    "general.architecture": _TEXT,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.ggml.tokens": _TEXTS,
    "tokenizer.ggml.merges": _TEXTS,
    "tokenizer.ggml.scores": _NUMBERS,
    "tokenizer.ggml.token_type": _NUMBERS,
    NEVER: _NUMBERS,
    "tokenizer.ggml.add_bos_token": _TRUTH,
    "tokenizer.ggml.add_eos_token": _TRUTH,
    "tokenizer.ggml.add_space_prefix": _TRUTH,
    TEMPLATE: _TEXT,
    "clip.projector_type": _TEXT,
    "clip.vision.projector_type": _TEXT,
    "clip.vision.projection_dim": _WHOLE,
    "clip.use_silu": _TRUTH,
    "clip.use_gelu": _TRUTH,
}
_ENDINGS = {
    "_token_id": _WHOLE,
    ".rope.scaling.type": _TEXT,
    ".attention.sliding_window": _WHOLE,
    ".expert_gating_func": _WHOLE,
    ".pooling_type": _WHOLE,
    ".embedding_length": _WHOLE,
}


@dataclass(frozen=True)
class Keys:
    """Typed access to the entries ``prefix.key`` of a file; ToolkitError for what is missing or impossible."""

    path: Path
    metadata: Mapping[str, Any]
    prefix: str

    def value(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}", default)

    def fail(self, key: str, found: object, expected: str) -> ToolkitError:
        return ToolkitError(f"{self.path}: {self.prefix}.{key}: expected {expected}, found {found!r:.40}")

    def whole(self, key: str, default: int | None = None) -> int:
        return self.positive(key, self.value(key, default))

    def positive(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.fail(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(key, value, "a number")
        return float(str(np.float32(value)))  # stored as float32: 9.99999975e-06 is 1e-05


def check_kinds(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise ToolkitError that names file and key for a value of another kind than its key says."""
    for key, value in metadata.items():
        kind = _KINDS.get(key) or next((kind for ending, kind in _ENDINGS.items() if key.endswith(ending)), None)
        if kind is None:
            continue
        good = isinstance(value, _TYPES[kind]) and (kind != _WHOLE or not isinstance(value, bool))
        if kind == _TEXTS and good:
            good = all(isinstance(text, str) for text in value)
        if not good:
            raise ToolkitError(f"{path}: {key}: expected {kind}, found {value!r:.40}")
