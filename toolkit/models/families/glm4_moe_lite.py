"""GLM-4.7-Flash: DeepSeek-V3 with a list of which layers have experts. Source: transformers
``Glm4MoeLiteForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.config.routing import on_disk, read_corrected, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import deepseek_v3
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_latent_dims(config, eps=1e-5)
    sparse = sparse_layers(config, dims.layers, first=1, listed=True)
    routing = read_corrected(config)
    make = read_routed(config, dims, inner=1536, shared=1, norm_topk=True, scale=1.8, sparse=sparse, **routing)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=768, nope_dim=192, v_dim=256),
        feed_forward=make,
        rename=on_disk,
        pairs=config.flag("rope_interleave", True),
    )


SIZES = {name: size for name, size in deepseek_v3.SIZES.items() if name != "first_k_dense_replace"}
FAMILY = Family(
    "glm4_moe_lite",
    "GLM-4.7-Flash",
    ("Glm4MoeLiteForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, q_lora_rank=32, v_head_dim=32, qk_nope_head_dim=24)),
        Tiny(dict(SIZES, q_lora_rank=64, n_group=2, topk_group=1, mlp_layer_types=["sparse", "dense", "sparse"])),
    ),
    deepseek_v3.GGUF,
)
