"""Qwen3-Next: linear attention by the gated delta rule in three layers of four, gated attention in the fourth, experts
in all. Source: transformers ``Qwen3NextForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.models.config.delta import gated_queries, read_delta, read_turns
from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.qwen3_moe import EVERY_LAYER, read_sparse
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, EXPERT_NUMBERS, QK_NORMS, SHARED_EXPERT, Gguf, with_experts, without
from toolkit.models.gguf_states import DELTA as DELTA_NAMES
from toolkit.models.gguf_states import GATED_QUERIES, RATES, delta_keys, delta_layouts, read_delta_keys
from toolkit.models.spec import MoeSpec, Rows
from toolkit.models.stored import Fused


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=256, kv_heads=2)
    return delta_like(config, dims, [gated_queries(dims), *_by_key_head(config)], feed_forward_of(config, dims))


def delta_like(
    config: Fields, dims: Dims, fused: list[Fused], feed_forward: Callable[[int], MoeSpec | None] | None = None
) -> Built:
    """What Qwen3-Next and Qwen3.5 have in common; arguments as of ``llama_like``."""
    return llama_like(
        config,
        dims,
        rope=read_turns(config, dims),
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        norm_offset=1.0,
        change=read_delta(config, dims),
        feed_forward=feed_forward,
        fused=fused,
    )


def feed_forward_of(config: Fields, dims: Dims) -> Callable[[int], MoeSpec | None]:
    """Experts as Qwen2-MoE has them, of other sizes where the config does not say."""
    return read_sparse(config, dims, inner=512, shared=512, shared_gate=True, norm_topk=True)


def _by_key_head(config: Fields) -> list[Fused]:
    """For each key head q, k, v and z of its share of the value heads in one module, their beta and fade in another."""
    k_heads, heads = (
        config.integer("linear_num_key_heads", default=16),
        config.integer("linear_num_value_heads", default=32),
    )
    k, v = config.integer("linear_key_head_dim", default=128), config.integer("linear_value_head_dim", default=128)
    share = heads // k_heads
    block, each = 2 * k + 2 * share * v, 2 * share

    def ranges(size: int, start: int, stop: int) -> Rows:
        return tuple((h * size + start, h * size + stop) for h in range(k_heads))

    q, keys, values = ranges(block, 0, k), ranges(block, k, 2 * k), ranges(block, 2 * k, 2 * k + share * v)
    rows = {
        "linear_attn.in_proj_qkv": q + keys + values,
        "linear_attn.in_proj_z": ranges(block, block - share * v, block),
    }
    rates = {"linear_attn.in_proj_b": ranges(each, 0, share), "linear_attn.in_proj_a": ranges(each, share, each)}
    return [Fused("linear_attn.in_proj_qkvz", rows), Fused("linear_attn.in_proj_ba", rates)]


DELTA = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)  # fmt: skip
NAMES = {
    **without(BLOCK, "ffn_norm"),
    **QK_NORMS,
    **DELTA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
}
EXPERT_NAMES = with_experts(NAMES, SHARED_EXPERT, {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
GGUF = Gguf(
    "qwen3next",
    "qwen3_next",
    EXPERT_NAMES,
    joined={**GATED_QUERIES, **RATES},
    biases=False,
    layouts=delta_layouts,
    fields={"hidden_act": "silu", "norm_topk_prob": True, **EVERY_LAYER},
    numbers={
        "num_experts": "expert_count",
        **EXPERT_NUMBERS,
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    read=read_delta_keys,
    write=lambda spec: delta_keys(spec, "qwen3next"),
    mtp_apart=True,
)
SIZES = dict(DELTA, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
FAMILY = Family(
    "qwen3_next",
    "Qwen3-Next 80B-A3B, Qwen3-Coder-Next",
    ("Qwen3NextForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(
            dict(
                SIZES, linear_num_value_heads=2, linear_value_head_dim=32, linear_conv_kernel_dim=3,
                mlp_only_layers=[1], norm_topk_prob=False, num_key_value_heads=1,
            )
        ),
    ),
    GGUF,
)  # fmt: skip
