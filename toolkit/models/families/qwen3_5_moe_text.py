"""Qwen3.5's text model with experts: Qwen3.5 with Qwen3-Next's experts, stacked in two tensors a layer.
Source: transformers ``Qwen3_5MoeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.delta import gated_queries
from toolkit.models.config.dims import read_dims, read_experts
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families import qwen3_5_text, qwen3_next
from toolkit.models.families.qwen3_next import DELTA, EXPERT_NAMES, delta_like, feed_forward_of
from toolkit.models.family import WITHIN, Family, Tiny
from toolkit.models.stored import fused_experts


def build(config: Fields) -> Built:
    sized = {"intermediate_size": 1, **config.values}  # no layer is dense
    dims = read_dims(Fields(sized, config.source, config.prefix), head_dim=256, kv_heads=2)
    routed = config.changed({"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []})
    feed_forward = feed_forward_of(routed, dims)
    count, _ = read_experts(config, dims.layers, "num_experts", "num_local_experts")
    stacks = fused_experts(count, dims.hidden, config.integer("moe_intermediate_size", default=512))
    return delta_like(config, dims, [gated_queries(dims), *stacks], feed_forward)


SIZES = dict(DELTA, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
GGUF = replace(
    qwen3_5_text.GGUF,
    arch="qwen35moe",
    family="qwen3_5_moe_text",
    names={**EXPERT_NAMES, "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"},
    numbers=qwen3_next.GGUF.numbers,
    write=lambda spec: qwen3_5_text.write_gguf(spec, "qwen35moe"),
)
FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3.5 35B-A3B to 397B-A17B (text)",
    ("Qwen3_5MoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, rope_parameters=qwen3_5_text.SECTIONS)),
        Tiny(dict(SIZES, linear_num_value_heads=2, linear_value_head_dim=32, tie_word_embeddings=True)),
    ),
    GGUF,
    spellings=WITHIN,
)
