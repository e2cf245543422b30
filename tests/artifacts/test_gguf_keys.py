"""Metadata of another kind than its key says is refused by name, never an internal error (found by fuzz)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.gguf.keys import check_kinds
from toolkit.errors import ToolkitError

GOOD = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.scores": np.zeros(2, "<f4"),
    "tokenizer.ggml.token_type": np.ones(2, "<i4"),
    "tokenizer.ggml.suppress_tokens": np.ones(2, "<i4"),
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.eot_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
    "phi3.attention.sliding_window": 7,
    "glm4moe.expert_gating_func": 2,
    "llama.embedding_length": 64,
    "clip.projector_type": "gemma3",
    "clip.vision.projection_dim": 64,
    "clip.use_gelu": True,
    "llama.rope.scaling.type": "linear",
    "anybody.else": np.zeros(3),
}


def test_what_the_format_writes_is_fine() -> None:
    check_kinds(Path("m.gguf"), GOOD)


@pytest.mark.parametrize("key", [key for key in GOOD if key != "anybody.else"])
@pytest.mark.parametrize("value", [np.zeros(3, "<i4"), [["a"]], 0.5, None, "x", 3, True])
def test_other_kinds_are_refused(key: str, value: Any) -> None:
    if isinstance(value, type(GOOD[key])) and not isinstance(value, list):
        return
    if key.endswith(("add_bos_token", "use_gelu")) and isinstance(value, int):
        return  # some writers spell it as a number
    with pytest.raises(ToolkitError, match=f"m.gguf: {key}: expected"):
        check_kinds(Path("m.gguf"), GOOD | {key: value})
