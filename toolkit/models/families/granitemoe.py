"""Granite 3 MoE: Granite with experts that are stacked in one tensor a layer. Source: transformers
``GraniteMoeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import LOCAL, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import granite
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, with_experts
from toolkit.models.stored import Fused, fused_experts, renamed

NAMES = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.input_linear": "block_sparse_moe.input_linear",
    "mlp.output_linear": "block_sparse_moe.output_linear",
}


def build(config: Fields) -> Built:
    dims = read_dims(config)
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        feed_forward=read_mixture(config, dims, *LOCAL, norm_topk=True),
        rename=renamed(NAMES),
        fused=stacks(dims, config.integer(*LOCAL)),
        **granite.multipliers(config),
    )


def stacks(dims: Dims, count: int) -> list[Fused]:
    return fused_experts(count, dims.hidden, dims.intermediate, ("mlp.input_linear", "mlp.output_linear"), bare=False)


SIZES = dict(granite.MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2)
FAMILY = Family(
    "granitemoe",
    "Granite 3 1B-A400M, 3B-A800M",
    ("GraniteMoeForCausalLM",),
    build,
    (Tiny(dict(SIZES, tie_word_embeddings=True)), Tiny(dict(SIZES, attention_bias=True, num_key_value_heads=1))),
    replace(
        granite.GGUF,
        arch="granitemoe",
        family="granitemoe",
        names=with_experts(BLOCK),
        numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
)
