"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts. Source: transformers ``Dots1ForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.routing import on_disk, read_groups, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import (
    BLOCK,
    CORRECTION,
    EXPERT_NUMBERS,
    QK_NORMS,
    SHARED_EXPERT,
    Gguf,
    read_routing,
    routing,
    with_experts,
)


def build(config: Fields) -> Built:
    dims = read_dims(config, kv_heads=32)
    config.text("scoring_func", default="noaux_tc", choices=("noaux_tc", "sigmoid"))  # the released file's word
    groups = read_groups(config)
    score = "two" if groups["groups"] > 1 else "best"
    routing: dict[str, Any] = dict(scoring="sigmoid", correction=True, group_score=score, **groups)
    slides = config.integer("max_window_layers", default=62, low=0, high=MAX_LAYERS)
    window = read_window(config, default=4096)
    sparse = sparse_layers(config, dims.layers, first=0)
    return llama_like(
        config,
        dims,
        windows=read_windows(config, dims.layers, window, [i >= slides for i in range(dims.layers)]),
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        feed_forward=read_routed(config, dims, inner=1408, shared=0, norm_topk=False, sparse=sparse, **routing),
        rename=on_disk,
    )


SIZES = dict(
    moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, norm_topk_prob=True,
    routed_scaling_factor=2.5,
)  # fmt: skip
FAMILY = Family(
    "dots1",
    "dots.llm1 142B-A14B",
    ("Dots1ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32, num_hidden_layers=3, first_k_dense_replace=1)),
        Tiny(
            dict(
                SIZES, head_dim=24, n_group=4, topk_group=2, n_shared_experts=1, norm_topk_prob=False,
                attention_bias=True, sliding_window=16, max_window_layers=1, num_key_value_heads=1,
            )
        ),
    ),
    Gguf(
        "dots1",
        "dots1",
        {
            **BLOCK,
            **with_experts({}, SHARED_EXPERT),
            **QK_NORMS,
            f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias",
        },
        biases=False,
        norm_topk=None,
        fields={"hidden_act": "silu", "sliding_window": None},
        numbers={"n_routed_experts": "expert_count", **EXPERT_NUMBERS},
        read=read_routing,
        write=lambda spec: routing(spec, "dots1"),
    ),
)  # fmt: skip
