"""Llama 1 to 3.3 and what has its shape under its name. Source: transformers ``LlamaForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import Dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, read_biases


def build(config: Fields, dims: Dims | None = None) -> Built:
    return llama_like(
        config, dims, attention_bias=config.flag("attention_bias", False), mlp_bias=config.flag("mlp_bias", False)
    )


GGUF = Gguf(
    "llama",
    "llama",
    BLOCK,
    interleaved_qk=True,
    fields={"hidden_act": "silu"},
    read=read_biases,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FAMILY = Family(
    "llama",
    "Llama 1, 2, 3, 3.1, 3.2, 3.3; Code Llama, DeepSeek-LLM, DeepSeek-Coder, Falcon 3, SmolLM2, TinyLlama, Vicuna, Yi",
    ("LlamaForCausalLM", "LLaMAForCausalLM"),
    build,
    (
        Tiny(dict(rope_parameters=LLAMA3)),
        Tiny(dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=24, num_key_value_heads=1)),
    ),
    GGUF,
)
