"""Youtu-LLM: DeepSeek-V3's latent attention without experts. Source: transformers ``YoutuForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_latent_dims(config, tied=True)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=1536),
        pairs=config.flag("rope_interleave", True),
    )


LATENT = dict(num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16)
FAMILY = Family(
    "youtu",
    "Youtu-LLM 2B",
    ("YoutuForCausalLM",),
    build,
    (
        Tiny(dict(LATENT, q_lora_rank=32, pad_token_id=None)),  # the row of one is made 0 as transformers loads it
        Tiny(dict(LATENT, q_lora_rank=None, rope_interleave=False, v_head_dim=24, tie_word_embeddings=False)),
    ),
    "llama.cpp's deepseek2 is written with experts alone, and this model has none",
)
