"""DeepSeek-V3: DeepSeek-V2 with scores by sigmoid, corrected for the choice of experts. Source: arXiv 2412.19437 and
transformers ``DeepseekV3ForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.config.routing import on_disk, read_corrected, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import deepseek_v2
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import SIGMOID


def build(config: Fields) -> Built:
    dims = read_latent_dims(config)
    sparse = sparse_layers(config, dims.layers, first=3, stepped=True)
    routing = read_corrected(config, groups=8, kept=4)
    make = read_routed(config, dims, inner=2048, shared=1, norm_topk=True, scale=2.5, sparse=sparse, **routing)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=1536),
        feed_forward=make,
        rename=on_disk,
        pairs=config.flag("rope_interleave", True),
    )


GGUF = replace(deepseek_v2.GGUF, family="deepseek_v3", scoring=SIGMOID)
SIZES = dict(deepseek_v2.SIZES, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5)
FAMILY = Family(
    "deepseek_v3",
    "DeepSeek-V3, V3.1, R1; Kimi K2, Moonlight",
    ("DeepseekV3ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, q_lora_rank=32, n_group=4, topk_group=2, rope_parameters=deepseek_v2.YARN)),
        Tiny(dict(SIZES, q_lora_rank=None, n_group=1, topk_group=1, rope_interleave=False, v_head_dim=24)),
    ),
    GGUF,
)
