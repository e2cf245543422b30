"""What transformers leaves out of the config of a draft's layers: what is as its class has it."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
QWEN3 = LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "head_dim": 128,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
BY_TYPE = {"llama": LLAMA, "qwen3": QWEN3}  # by ``model_type``
