"""Shapes of the models that are checked and measured: configs as ``config.json`` has them, weights are made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.models.registry import get
from toolkit.models.tiny import tiny_config

if TYPE_CHECKING:
    import torch


_PLAIN = {"head_dim": 16, "rms_norm_eps": 1e-6, "dtype": "float32"}
# Families whose peculiarities matter to kernels within some dozen tokens.
TINY = {
    family: _PLAIN | tiny_config(get(family)) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral")
}
# Latent rows; short convolutions; Mamba-2 beside attention and alone; the gated delta rule.
KEPT = ("minicpm3", "deepseek_v2", "lfm2", "falcon_h1", "mamba2", "qwen3_next")
TINY |= {family: tiny_config(get(family)) | {"dtype": "float32"} for family in KEPT}
TINY["awq"] = TINY["llama"] | {
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64},
    "dtype": "float16",
}

# Few layers as wide as served ones are, so that their very kernels run: heads of 128, groups of 128, half precision.
_WIDE: dict[str, Any] = TINY["llama"] | {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
WIDE: dict[str, dict[str, Any]] = {
    "wide": _WIDE,
    "wide awq": _WIDE
    | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}, "dtype": "float16"},
}
CONFIGS = TINY | WIDE

_BIG: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "architectures": ["LlamaForCausalLM"],
}
BIG: dict[str, dict[str, Any]] = {
    "1b": _BIG
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": _BIG
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "moe": _BIG
    | {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}, "dtype": "float16"}
HEAD8 = {  # as tool convert --target cuda-sm90 --head-bits 8 leaves a model
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "lm_head": True,
        "dynamic": {"+:^lm_head$": {"bits": 8}},
    },
    "dtype": "float16",
}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


def dummy(config: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """(spec, made-up weights on ``device``) of a config."""
    from toolkit.models.registry import build
    from toolkit.runners.weights.dummy import DummyWeights

    spec, stored = build(config, "config")
    return spec, DummyWeights(spec, stored, config, device)
