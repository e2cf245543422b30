"""Mellum 2: Qwen3 MoE whose layers slide in part, with a rope of their own. Source: transformers
``MellumForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import layer_ropes, read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=128, kv_heads=4)
    windows = read_windows(config, dims.layers, read_window(config, default=1024), [False] * dims.layers)
    kinds = config.choices("mlp_layer_types", dims.layers, ("dense", "sparse")) or ["sparse"] * dims.layers
    return llama_like(
        config,
        dims,
        rope=layer_ropes(config, dims, windows, theta=500_000.0, local_theta=10_000.0),
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        feed_forward=read_mixture(
            config,
            dims,
            inner=config.integer("moe_intermediate_size", default=896),
            norm_topk=config.flag("norm_topk_prob", True),
            sparse=[kind == "sparse" for kind in kinds],
        ),
    )


SIZES = dict(moe_intermediate_size=64, num_local_experts=6, num_experts_per_tok=3)
ROPES = dict(
    full_attention=dict(rope_type="default", rope_theta=50_000.0),
    sliding_attention=dict(rope_type="default", rope_theta=1_000.0),
)
FAMILY = Family(
    "mellum",
    "Mellum 2 12B-A2.5B",
    ("MellumForCausalLM",),
    build,
    (
        Tiny(
            dict(
                SIZES, head_dim=32, num_hidden_layers=3, sliding_window=16, rope_parameters=ROPES,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                mlp_layer_types=["dense", "sparse", "sparse"],
            )
        ),
        Tiny(dict(SIZES, head_dim=24, num_key_value_heads=1, norm_topk_prob=False, attention_bias=True)),
    ),
    "llama.cpp has no such architecture",
)  # fmt: skip
