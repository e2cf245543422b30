"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of them shared and weighed by a gate of its own.
Source: transformers ``Qwen2MoeForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.qwen3_moe import EVERY_LAYER, read_sparse
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, EXPERT_NUMBERS, SHARED_EXPERT, Gguf, with_experts


def build(config: Fields) -> Built:
    dims = read_dims(config, kv_heads=16)
    window = read_window(config, default=4096) if config.flag("use_sliding_window", False) else None
    last = config.integer("max_window_layers", default=28, low=0, high=MAX_LAYERS)
    windows = read_windows(config, dims.layers, window, [i % 2 == 0 and i < last for i in range(dims.layers)])
    feed_forward = read_sparse(config, dims, inner=1408, shared=5632, shared_gate=True, norm_topk=False)
    return llama_like(config, dims, windows=windows, qkv_bias=config.flag("qkv_bias", True), feed_forward=feed_forward)


SIZES = dict(moe_intermediate_size=32, shared_expert_intermediate_size=96, num_experts=6, num_experts_per_tok=3)
FAMILY = Family(
    "qwen2_moe",
    "Qwen1.5-MoE A2.7B, Qwen 2 57B-A14B",
    ("Qwen2MoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, num_key_value_heads=4)),
        Tiny(
            dict(
                SIZES, norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[1], use_sliding_window=True,
                sliding_window=16, max_window_layers=2, qkv_bias=False,
            )
        ),
    ),
    Gguf(
        "qwen2moe",
        "qwen2_moe",
        with_experts(BLOCK, SHARED_EXPERT, {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}),
        norm_topk=False,
        fields={"hidden_act": "silu", "use_sliding_window": False, **EVERY_LAYER, "norm_topk_prob": False},
        numbers={
            "num_experts": "expert_count",
            **EXPERT_NUMBERS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        read=lambda file, config: {"qkv_bias": "blk.0.attn_q.bias" in file.tensors},
    ),
)  # fmt: skip
