"""Seed-OSS: Llama with biases on q, k and v. Source: transformers ``SeedOssForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, without


def build(config: Fields) -> Built:
    return llama_like(
        config,
        read_dims(config, head_dim=128, kv_heads=8),
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


FAMILY = Family(
    "seed_oss",
    "Seed-OSS 36B",
    ("SeedOssForCausalLM",),
    build,
    (Tiny(dict(head_dim=32)), Tiny(dict(head_dim=24, attention_out_bias=True, mlp_bias=True))),
    Gguf(
        "seed_oss",
        "seed_oss",
        {**without(BLOCK, "ffn_norm"),
         "post_attention_norm": "post_attention_layernorm"},
        fields={"hidden_act": "silu"},
        read=lambda file, config: {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        },
    ),
)  # fmt: skip
