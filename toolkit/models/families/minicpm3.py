"""MiniCPM 3: MiniCPM's multipliers over latent attention. Source: transformers ``MiniCPM3ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_latent_dims(config, eps=1e-5, tied=True)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=768, kv_rank=256, nope_dim=64, rope_dim=32, v_dim=None),
        residual_scale=config.number("scale_depth", default=1.4) / dims.layers**0.5,
        embed_scale=config.number("scale_emb", default=12.0),
        head_scale=config.integer("dim_model_base", default=256) / dims.hidden,
    )


SIZES = dict(
    num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32, scale_emb=3,
    dim_model_base=32,
)  # fmt: skip
LONG = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=256,
    short_factor=[1 + i / 20 for i in range(16)], long_factor=[1 + i / 5 for i in range(16)],
)  # fmt: skip
FAMILY = Family(
    "minicpm3",
    "MiniCPM 3 4B",
    ("MiniCPM3ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, rope_parameters=LONG)),
        Tiny(dict(SIZES, v_head_dim=24, q_lora_rank=None, tie_word_embeddings=False)),
    ),
    "llama.cpp's minicpm3 is neither read nor written yet",
)
