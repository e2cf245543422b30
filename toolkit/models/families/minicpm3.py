"""MiniCPM 3: MiniCPM's multipliers over latent attention. Source: transformers ``MiniCPM3ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, WHOLE, Gguf, Metadata, without
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_latent_dims(config, eps=1e-5, tied=True)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=768, kv_rank=256, nope_dim=64, rope_dim=32, v_dim=None),
        mlp_bias=config.flag("mlp_bias", False),
        residual_scale=config.number("scale_depth", default=1.4) / dims.layers**0.5,
        embed_scale=config.number("scale_emb", default=12.0),
        head_scale=config.integer("dim_model_base", default=256) / dims.hidden,
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    turned = file.whole("rope.dimension_count")
    v_dim = file.whole("attention.value_length", config["hidden_size"] // config["num_attention_heads"])
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": file.whole("attention.kv_lora_rank"),
        "q_lora_rank": file.whole("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": file.whole("attention.key_length") - turned,
        "v_head_dim": v_dim,
        "head_dim": turned,
        "partial_rotary_factor": 1.0,
        **MULTIPLIERS,
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    """llama.cpp has the released model's multipliers for those of all."""
    found = {
        "scale_emb": spec.embed_scale,
        "scale_depth": spec.layers[0].sublayers[0].residual_scale * len(spec.layers) ** 0.5,
        "dim_model_base": spec.head_scale * spec.hidden_size,
    }
    for name, only in MULTIPLIERS.items():
        if abs(found[name] / only - 1) > 1e-6:
            raise ToolkitError(f"gguf: llama.cpp's minicpm3 has {only} for {name}, this model {found[name]:g}")
    latents = [mixer for _, mixer in spec.mixers() if mixer.kind == "latent"]
    if latents[0].q_a is None:
        raise ToolkitError("gguf: llama.cpp's minicpm3 makes queries from a latent, this model does not")
    return {}


MULTIPLIERS = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
GGUF = Gguf(
    "minicpm3",
    "minicpm3",
    {
        **without(BLOCK, "attn_q", "attn_k", "attn_v"),
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        WHOLE: "self_attn.kv_b_proj",
    },
    biases=False,
    fields={"hidden_act": "silu"},
    read=_read,
    write=_write,
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
        Tiny(dict(SIZES, **MULTIPLIERS, rope_parameters=LONG)),
        Tiny(dict(SIZES, v_head_dim=24, q_lora_rank=None, tie_word_embeddings=False)),
    ),
    GGUF,
)
