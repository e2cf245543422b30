"""Flint: Qwen3 MoE with sinks, layers of which most slide, the others without rope, experts whose scores are sigmoids
and one that every token goes through. Source: transformers ``FlintForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.qwen3_moe import read_sparse
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import renamed


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=128, kv_heads=4)
    sees = [i < 2 or i % 4 == 1 or i == dims.layers - 1 for i in range(dims.layers)]
    windows = read_windows(config, dims.layers, read_window(config, default=513), [not whole for whole in sees])
    routed = config.filled({"mlp_only_layers": [0, 1][: dims.layers]})
    return llama_like(
        config,
        dims,
        turned=[window is not None for window in windows],
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        sinks=True,
        feed_forward=read_sparse(routed, dims, inner=512, norm_topk=True, shared=1024, scoring="sigmoid"),
        rename=renamed({"self_attn.sinks": "self_attn.softmax_offset"}),
    )


SIZES = dict(
    num_hidden_layers=4, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8,
    num_experts_per_tok=3, sliding_window=16, mlp_only_layers=[0],
)  # fmt: skip
FAMILY = Family(
    "flint",
    "Flint",
    ("FlintForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32)),
        Tiny(
            dict(
                SIZES, head_dim=24, num_key_value_heads=1, norm_topk_prob=False, attention_bias=True,
                layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=True,
            )
        ),
    ),
    "llama.cpp has no such architecture",
)  # fmt: skip
