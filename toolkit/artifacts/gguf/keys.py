"""What kind of value a metadata key of a GGUF file must have, for the keys that are not read through typed access."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError

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
    "tokenizer.ggml.add_bos_token": _TRUTH,
    "tokenizer.ggml.add_space_prefix": _TRUTH,
    "tokenizer.chat_template": _TEXT,
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
    ".embedding_length": _WHOLE,
}


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
