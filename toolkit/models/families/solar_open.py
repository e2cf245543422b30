"""Solar Open: GLM-4.5 with experts in every layer, whose heads turn whole. Source: transformers
``SolarOpenForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import on_disk, read_corrected, read_routed
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import glm4_moe
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    sized = config.changed({"intermediate_size": 1})  # no layer is dense
    dims = read_dims(sized, eps=1e-5, head_dim=128, kv_heads=8)
    return llama_like(
        config,
        dims,
        theta=1e6,
        qkv_bias=config.flag("attention_bias", False),
        feed_forward=read_routed(config, dims, inner=1280, shared=1, norm_topk=True, **read_corrected(config)),
        rename=on_disk,
    )


FAMILY = Family(
    "solar_open",
    "Solar Open 100B",
    ("SolarOpenForCausalLM",),
    build,
    (
        Tiny(dict(glm4_moe.SIZES, head_dim=32)),
        Tiny(dict(glm4_moe.SIZES, head_dim=24, attention_bias=True, n_group=4, topk_group=2, norm_topk_prob=False)),
    ),
    glm4_moe.GGUF,
)
