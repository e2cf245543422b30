"""A.X K1: DeepSeek-V3 with a norm behind its experts. Source: transformers ``AXK1ForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.config.routing import on_disk, read_corrected, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like, rms_norm
from toolkit.models.families import deepseek_v2, deepseek_v3
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import Sublayer
from toolkit.models.stored import stored_tensors


def build(config: Fields) -> Built:
    dims = read_latent_dims(config)
    sparse = sparse_layers(config, dims.layers, first=1, stepped=True, listed=True)
    routing = read_corrected(config, groups=8, kept=4)
    make = read_routed(config, dims, inner=2048, shared=1, norm_topk=True, scale=2.5, sparse=sparse, **routing)
    spec, _ = llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=1536),
        feed_forward=make,
    )

    def normed(layer: int, s: Sublayer) -> Sublayer:
        norm = rms_norm(f"model.layers.{layer}.post_mlp_layernorm", dims.hidden, dims.eps)
        return replace(s, post_norm=norm) if s.mixer.kind == "moe" else s

    spec = spec.changed(normed)
    return spec, stored_tensors(spec, on_disk, pairs=config.flag("rope_interleave", True))


FAMILY = Family(
    "axk1",
    "A.X K1 519B-A33B",
    ("AXK1ForCausalLM",),
    build,
    (
        Tiny(
            dict(
                deepseek_v3.SIZES, q_lora_rank=32, n_group=4, topk_group=2, rope_parameters=deepseek_v2.YARN,
                mlp_layer_types=["dense", "sparse", "sparse"],
            )
        ),
        Tiny(
            dict(
                deepseek_v3.SIZES, q_lora_rank=32, n_group=1, topk_group=1, rope_interleave=False, v_head_dim=24,
                mlp_layer_types=["sparse"] * 3,
            )
        ),
    ),
    "llama.cpp has no such architecture",
)  # fmt: skip
