"""Qwen3: an RMS norm over each head of q and k, no biases by default. Source: transformers ``Qwen3ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.qwen2 import layer_windows
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf

FIELDS = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=128, kv_heads=32)
    windows = layer_windows(config, dims.layers)
    return llama_like(config, dims, windows=windows, attention_bias=config.flag("attention_bias", False), qk_norm=True)


GGUF = Gguf("qwen3", "qwen3", {**BLOCK, **QK_NORMS}, biases=False, fields=FIELDS)
FAMILY = Family(
    "qwen3",
    "Qwen 3",
    ("Qwen3ForCausalLM",),
    build,
    (Tiny(dict(head_dim=32)),),
    GGUF,
)
